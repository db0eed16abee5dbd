// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Activations in float32, in loops that any compiler vectorizes.

// Returns a * b + c, with one rounding if the instruction set has it.
JAXPLUGIN_ALWAYS_INLINE float MulAdd(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Returns e^x to about 2 ulp: 0 below and Inf above float32's range, NaN for
// NaN.
JAXPLUGIN_ALWAYS_INLINE float Exp(float x) {
  // Outside of these limits the result is 0 or Inf. The clamp keeps both powers
  // of two below in range.
  float clamped = x < -110.0f ? -110.0f : x;
  clamped = clamped > 100.0f ? 100.0f : clamped;
  // Adding 12582912 = 1.5 * 2^23 rounds to an integer, which the low bits hold.
  const float shifted = MulAdd(clamped, 1.44269504088896341f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  const int32_t exponent = static_cast<int32_t>(AsBits(shifted)) - 0x4b400000;
  float r = MulAdd(n, -0.693359375f, clamped);  // ln 2 in two parts
  r = MulAdd(n, 2.12194440054690583e-4f, r);
  float p = 1.0f / 5040;
  p = MulAdd(p, r, 1.0f / 720);
  p = MulAdd(p, r, 1.0f / 120);
  p = MulAdd(p, r, 1.0f / 24);
  p = MulAdd(p, r, 1.0f / 6);
  p = MulAdd(p, r, 0.5f);
  p = MulAdd(p, r, 1.0f);
  p = MulAdd(p, r, 1.0f);
  const int32_t half = exponent >> 1;
  const float low = AsFloat(static_cast<uint32_t>(half + 127) << 23);
  const float high = AsFloat(static_cast<uint32_t>(exponent - half + 127)
                             << 23);
  return x != x ? x : p * low * high;
}

// 0.5 x (1 + tanh(u)) equals x / (1 + e^-2u), which has no cancellation.
JAXPLUGIN_ALWAYS_INLINE float Gelu(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + Exp(-2.0f * u));
}

// The normal distribution at x: the probability of less than x, and x times the
// density.
struct NormalTerms {
  float probability, change;
};

// The probability of more than |x| is e^(-x^2 / 2) t p(t) with t = 1 / (1 + c
// |x|), the form of Abramowitz and Stegun, 7.1.26. p has least maximum relative
// error, 2^-25 for |x| <= 14.5. It is in powers of t - 0.625, whose coefficients
// cancel less.
JAXPLUGIN_ALWAYS_INLINE NormalTerms NormalTermsOf(float x) {
  const float size = x < 0 ? -x : x;
  const float decay = Exp(-0.5f * (x * x));
  const float t = 1.0f / MulAdd(0.34375f, size, 1.0f);
  const float s = t - 0.625f;
  float p = -0.027582265436649323f;
  p = MulAdd(p, s, 0.004892938304692507f);
  p = MulAdd(p, s, 0.0534064844250679f);
  p = MulAdd(p, s, -0.028220422565937042f);
  p = MulAdd(p, s, -0.10260549187660217f);
  p = MulAdd(p, s, 0.05316734313964844f);
  p = MulAdd(p, s, 0.32173675298690796f);
  p = MulAdd(p, s, 0.41901886463165283f);
  p = MulAdd(p, s, 0.2969154715538025f);
  const float tail = p * t * decay;
  // x may be infinite where the density is 0.
  const float change = decay == 0 ? 0.0f : 0.3989422804014327f * decay * x;
  return {x < 0 ? tail : 1.0f - tail, change};
}

// x / 2 * (1 + erf(x / sqrt(2))), without cancellation for negative x.
JAXPLUGIN_ALWAYS_INLINE float ExactGelu(float x) {
  return x * NormalTermsOf(x).probability;
}

JAXPLUGIN_ALWAYS_INLINE float Silu(float x) { return x / (1.0f + Exp(-x)); }

// The activation of gpt-oss. NaN passes the clamps, as in jnp.minimum and
// jnp.clip.
JAXPLUGIN_ALWAYS_INLINE float SwigluOai(float gate, float value, float alpha,
                                        float limit) {
  gate = gate > limit ? limit : gate;
  value = value > limit ? limit : value;
  value = value < -limit ? -limit : value;
  return gate / (1.0f + Exp(-alpha * gate)) * (value + 1.0f);
}
