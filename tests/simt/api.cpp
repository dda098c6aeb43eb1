// The runtime's interface for Python (control.py), by C functions.
#include <cstring>

#include "runtime.h"

#define API extern "C" __attribute__((visibility("default")))

API void ls_simt_register_region(const void* ptr, size_t n_bytes, bool writable, const char* name) {
  simt::register_region(ptr, n_bytes, writable, name);
}

API void ls_simt_clear_regions() { simt::clear_regions(); }

API void ls_simt_set_schedule(uint64_t seed) { simt::set_schedule(seed); }

API void ls_simt_reset_stats() { simt::reset_stats(); }

namespace {

std::string json(const simt::Traffic& t) {
  return "{\"read\": " + std::to_string(t.read) + ", \"written\": " + std::to_string(t.written) +
         ", \"cold_read\": " + std::to_string(t.cold_read) + ", \"cold_written\": " + std::to_string(t.cold_written) + "}";
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c < ' ' && c >= 0 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace

// The totals as JSON; valid until the next call on this thread.
API const char* ls_simt_stats() {
  static thread_local std::string text;
  const simt::Stats& s = simt::stats();
  text = "{\"launches\": " + std::to_string(s.launches) + ", \"blocks\": " + std::to_string(s.blocks) +
         ", \"barriers\": " + std::to_string(s.barriers) + ", \"warp_collectives\": " + std::to_string(s.warp_collectives) +
         ", \"global\": " + json(s.global) + ", \"regions\": {";
  const char* separator = "";
  for (const auto& [name, traffic] : s.regions) {
    text += separator + quoted(name) + ": " + json(traffic);
    separator = ", ";
  }
  text += "}}";
  return text.c_str();
}
