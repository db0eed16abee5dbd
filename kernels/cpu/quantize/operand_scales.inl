// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Computes the scales of the blocks of a tile for quantize/operand.inl. An
// NVFP4 block is scaled so that its amax becomes 6. With four_over_six it is
// scaled to 6 or 4, whichever has the smaller squared error.

// The scales of the blocks of a tile, and the steps to encode their values.
struct Scales {
  Ints code[kMaxVectors];
  Step step[kMaxVectors];
};

template <typename T>
JAXPLUGIN_ALWAYS_INLINE void MxScales(const OperandArgs& args,
                                      const Ints* maxima, int vectors,
                                      Scales* out) {
  constexpr int32_t kMaxMantissa = T::kMaxBits & 0x7fffff;
  for (int v = 0; v < vectors; ++v) {
    const Ints amax = maxima[v];
    Ints byte = (amax >> 23) - T::kMaxExponent;
    // A true comparison is -1.
    if (args.round_up) byte -= (amax & 0x7fffff) > kMaxMantissa;
    byte = MaxInts(byte, Ints{});
    const Ints keep = amax < static_cast<int32_t>(kInfinity);
    out->step[v] = {FloatsOf((254 - byte) << 23), keep};
    out->code[v] = keep ? byte : SplatInts(255);
  }
}

// Returns the codes of positive scales, rounded to nearest or up.
JAXPLUGIN_ALWAYS_INLINE Ints Nvfp4Codes(Ints ideal, bool up) {
  const Ints code = EncodeNearest<E4M3>(ideal);
  if (!up) return code;
  const Ints number = IntsOf(FloatsOf(code << 20) * 0x1p120f);
  return code - ((number < ideal) & (code < E4M3::kFacts.max_code));
}

// Computes scales such that the largest magnitude of a block becomes `largest`.
// `numbers` are the values of the scales.
JAXPLUGIN_ALWAYS_INLINE void Nvfp4ScalesTo(float largest, bool up,
                                           const Nvfp4Global& global,
                                           const Ints* maxima, int vectors,
                                           Scales* out, Floats* numbers) {
  for (int v = 0; v < vectors; ++v) {
    Ints keep = maxima[v] < static_cast<int32_t>(kInfinity);
    if (global.invalid) keep = Ints{};
    Floats amax = FloatsOf(maxima[v] & keep);
    if (global.tiny) {
      // If this overflows to Inf, the scale saturates, as for any number this
      // large.
      amax = amax * 0x1p64f;
    }
    // Compares bits, which have the order of positive floats.
    const Ints ideal = MaxInts(IntsOf(amax / largest / global.divisor) & keep,
                               IntsOf(SplatFloats(kMinE4M3)));
    const Ints code = Nvfp4Codes(ideal, up);
    numbers[v] = FloatsOf(code << 20) * 0x1p120f;
    // If a block is not kept, its quotients do not matter.
    out->step[v].factor = numbers[v] * global.divisor;
    out->step[v].keep = keep;
    out->code[v] = keep ? code & (maxima[v] != 0) : SplatInts(0x7f);
  }
}

// Sums kCount numbers into x[0]: first x[0] + x[half], x[1] + x[half + 1], ...,
// then these sums in the same way.
template <int kCount, typename V>
JAXPLUGIN_ALWAYS_INLINE void SumTree(V* x) {
  for (int half = kCount / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  }
}

// Computes the sums of a block's squared errors, in units of the global scale:
// per row, or over all rows if they share scales.
JAXPLUGIN_ALWAYS_INLINE void Nvfp4Errors(const OperandArgs& args,
                                         const Floats* x, int vectors,
                                         const Scales& scales,
                                         const Floats* numbers, Floats* sums) {
  float rows[kMinBlock] = {};
  for (int v = 0; v < vectors; ++v) {
    Floats squares[kMinBlock];
    for (int i = 0; i < kMinBlock; ++i) {
      const Floats magnitude = FloatsOf(IntsOf(x[i * vectors + v]) &
                                        static_cast<int32_t>(kMagnitude));
      const Ints quotient =
          IntsOf(magnitude / scales.step[v].factor) & scales.step[v].keep;
      const Ints code = EncodeNearest<E2M1>(quotient);
      const Ints half = code & 1 & (code < 2);
      const Ints rounded = code < 2 ? -half & IntsOf(SplatFloats(0.5f))
                                    : (code << 22) + (126 << 23);
      const Floats error = (FloatsOf(quotient) - FloatsOf(rounded)) *
                           numbers[v];
      const Floats square = error * error;
      // Subnormal squares become 0, because XLA's operations flush them.
      squares[i] = FloatsOf((square >= 0x1p-126f) & IntsOf(square));
    }
    SumTree<kMinBlock>(squares);
    sums[v] = squares[0];
    for (int i = 0; i < kLanes; ++i) rows[v * kLanes + i] = sums[v][i];
  }
  if (args.square == 0) return;
  SumTree<kMinBlock>(rows);
  for (int v = 0; v < vectors; ++v) sums[v] = SplatFloats(rows[0]);
}

// Computes NVFP4's scales: to 6, or with four_over_six to 4 if that has the
// smaller error.
JAXPLUGIN_ALWAYS_INLINE void Nvfp4ScalesOf(const OperandArgs& args,
                                           const Nvfp4Global& global,
                                           const Floats* x, const Ints* maxima,
                                           int vectors, Scales* out) {
  Floats numbers[kMaxVectors];
  Nvfp4ScalesTo(6, args.scale_up, global, maxima, vectors, out, numbers);
  if (!args.four_over_six) return;
  Scales other;
  Floats other_numbers[kMaxVectors], error[kMaxVectors];
  Floats other_error[kMaxVectors];
  Nvfp4ScalesTo(4, args.scale_up, global, maxima, vectors, &other,
                other_numbers);
  Nvfp4Errors(args, x, vectors, *out, numbers, error);
  Nvfp4Errors(args, x, vectors, other, other_numbers, other_error);
  for (int v = 0; v < vectors; ++v) {
    const Ints is_other = other_error[v] < error[v];
    Step& step = out->step[v];
    const Step& its = other.step[v];
    step.factor =
        FloatsOf(is_other ? IntsOf(its.factor) : IntsOf(step.factor));
    out->code[v] = is_other ? other.code[v] : out->code[v];
  }
}
