// Transcendental functions in vectors, besides vec.h's exp_nonpositive: tanh and the normal distribution.
//
// Both hold for every float; NaN gives NaN. The coefficients are minimax fits made for these forms (weighted least squares on
// Chebyshev points, weights raised where the error is largest).
#pragma once

#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

inline vfloat vabs(vfloat x) { return reinterpret_cast<vfloat>(reinterpret_cast<vint>(x) & 0x7FFFFFFF); }

// tanh(x) = x P(x^2) / Q(x^2), both of degree 4, up to where it rounds to 1. Error under 5 ulp; the fit's own is 1.5e-8.
LS_ALWAYS_INLINE vfloat vtanh(vfloat x) {
  constexpr float kSaturated = 9.01f;  // 1 - tanh(9.01) is under half an ulp of 1
  const vfloat magnitude = vabs(x), t = x * x;
  vfloat p = broadcast(1.3897395e-8f);
  p = p * t + 2.0993662e-5f;
  p = p * t + 3.5187337e-3f;
  p = p * t + 0.13400458f;
  p = p * t + 1.0f;
  vfloat q = broadcast(7.9964303e-7f);
  q = q * t + 3.3236310e-4f;
  q = q * t + 2.5964854e-2f;
  q = q * t + 0.46733779f;
  q = q * t + 1.0f;
  vfloat y = magnitude * p / q;
  y = (y > 1.0f) | (magnitude >= kSaturated) ? broadcast(1.0f) : y;
  return reinterpret_cast<vfloat>(reinterpret_cast<vint>(y) | (reinterpret_cast<vint>(x) & INT32_MIN));
}

// The distribution function of the standard normal, Phi(x) = (1 + erf(x / sqrt(2))) / 2, and exp(-x^2 / 2), which is its
// derivative but for the factor 1 / sqrt(2 pi).
struct Normal {
  vfloat cdf, exp;
};

// Phi(-|x|) = exp(-x^2 / 2) R(t), t = 1 / (1 + 0.35 |x|), R a polynomial of degree 7 without a constant: the form of Abramowitz &
// Stegun 7.1.26, with two degrees more. Absolute error of the cdf under 2e-7 (the fit's own is 6e-8); in the lower tail it stays within
// 1e-5 of the value, where 1 + erf cancels.
LS_ALWAYS_INLINE Normal normal(vfloat x) {
  const vfloat magnitude = vabs(x);
  const vfloat t = 1.0f / (1.0f + 0.35f * magnitude);
  const vfloat e = exp_nonpositive(-0.5f * (x * x));
  // In pairs, not by Horner: half the chain of additions that wait for one another.
  const vfloat t2 = t * t;
  const vfloat r0 = t * 0.13713910f + 0.13975461f, r1 = t * 1.1719245e-2f + 0.14192435f, r2 = t * -0.18238206f + 0.20773128f;
  const vfloat r = ((t2 * 4.4113506e-2f + r2) * t2 + r1) * t2 + r0;
  const vfloat tail = e * (r * t);
  return {x < 0.0f ? tail : 1.0f - tail, e};
}

}  // namespace ls::cpu::LS_ISA
