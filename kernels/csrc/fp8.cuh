// One-byte KV elements whose conversion to bf16 is ours.
//
// At fp8 the attention kernel is bound by instructions, and on an H200 a third of those of a KV tile were
// FlashInfer's conversion (vec_dtypes.cuh, fast_dequant_f8f16x4): 40 for 16 elements, each masked and
// shifted within its half word. Here four elements are split into the high and the low bytes of their
// results by shifts of the whole word, and two byte permutations put them together: 36 for 16.
//
// FlashInfer's template knows of an element's type only its size and vec_cast<bf16, type>, so a type of our
// own brings its conversion along. fp16 queries keep FlashInfer's types: sm_89 and later convert to fp16 in
// hardware.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spec_mask {

// 1 sign bit, EXPONENT_BITS, and a mantissa: e4m3fn and e5m2 as torch has them.
template <int EXPONENT_BITS>
struct Fp8 {
  uint8_t bits;
};
using Fp8E4M3 = Fp8<4>;
using Fp8E5M2 = Fp8<5>;

// Exponent of two that the words of fp8_to_bf16_words lack: the difference of the exponents' biases.
template <int EXPONENT_BITS>
constexpr int kFp8Bias = 127 - ((1 << (EXPONENT_BITS - 1)) - 1);

// Four elements as two words of two bf16 each, in order, all 2^-kFp8Bias too small. The exponent of bf16 has
// 8 bits, so sign, zeros, exponent and mantissa of an element lie in bits 15 to 8 and, what is shifted out of
// those, 7 to 4. Zeros and subnormal numbers are then subnormal numbers of bf16, which the
// multiplication makes right. NaN and infinity become numbers beyond the largest finite one.
template <int EXPONENT_BITS>
__device__ __forceinline__ void fp8_to_bf16_words(uint32_t x, uint32_t& first, uint32_t& second) {
  constexpr int kShift = 8 - EXPONENT_BITS;
  constexpr uint32_t kHigh = 0x01010101u * (0x7fu >> kShift);
  constexpr uint32_t kLow = 0x01010101u * (0xffu << (8 - kShift) & 0xffu);
  const uint32_t high = (x & 0x80808080u) | (x >> kShift & kHigh);
  const uint32_t low = x << (8 - kShift) & kLow;
  first = __byte_perm(low, high, 0x5140);
  second = __byte_perm(low, high, 0x7362);
}

}  // namespace spec_mask

#if __has_include(<flashinfer/vec_dtypes.cuh>)  // not where the words alone are tested
#include <cuda_bf16.h>

#include <flashinfer/vec_dtypes.cuh>

namespace flashinfer {

template <int EXPONENT_BITS>
struct vec_cast<__nv_bfloat16, spec_mask::Fp8<EXPONENT_BITS>> {
  template <size_t vec_size>
  __device__ __forceinline__ static void cast(__nv_bfloat16* dst,
                                              const spec_mask::Fp8<EXPONENT_BITS>* src) {
    static_assert(vec_size % 4 == 0, "elements are converted by fours");
    // 2^kFp8Bias, exact in bf16; so is each product.
    constexpr uint32_t kScale = 0x00010001u * ((127u + spec_mask::kFp8Bias<EXPONENT_BITS>) << 7);
    const uint32_t scale_bits = kScale;
    const __nv_bfloat162 scale = reinterpret_cast<const __nv_bfloat162&>(scale_bits);
#pragma unroll
    for (size_t i = 0; i < vec_size; i += 4) {
      uint32_t words[2];
      spec_mask::fp8_to_bf16_words<EXPONENT_BITS>(*reinterpret_cast<const uint32_t*>(src + i), words[0],
                                                  words[1]);
      auto* out = reinterpret_cast<__nv_bfloat162*>(dst + i);
      out[0] = __hmul2(reinterpret_cast<const __nv_bfloat162&>(words[0]), scale);
      out[1] = __hmul2(reinterpret_cast<const __nv_bfloat162&>(words[1]), scale);
    }
  }
};

}  // namespace flashinfer
#endif
