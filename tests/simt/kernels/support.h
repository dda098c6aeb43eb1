// What the test kernels share. Every test is an extern "C" function that returns null, or the message of what was caught.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt.h"

constexpr unsigned kFullMask = 0xffffffffu;

template <typename Body>
const char* caught(Body body) {
  static std::string message;
  simt::clear_regions();
  try {
    body();
    simt::clear_regions();
    return nullptr;
  } catch (const std::exception& e) {
    message = e.what();
    simt::clear_regions();
    return message.c_str();
  }
}

#define TEST(name, ...)                 \
  extern "C" const char* name() {       \
    return caught([] { __VA_ARGS__; }); \
  }

// A host buffer known to the runtime.
template <typename T>
struct Buffer {
  std::vector<T> host;
  Buffer(size_t n, const char* name, bool writable = true, T value = T()) : host(n, value) {
    simt::register_region(host.data(), n * sizeof(T), writable, name);
  }
  T* data() { return host.data(); }
};
