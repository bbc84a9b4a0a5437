// FlashInfer's wrappers of PTX (mma.cuh, cp_async.cuh, math.cuh) on emulated warps: the same names and
// arguments, written from the PTX ISA's descriptions of the instructions. Included in their place, with their
// include guards defined. Only what the FA2 template uses.
#pragma once

#define FLASHINFER_MMA_CUH_
#define FLASHINFER_CP_ASYNC_CUH_
#define FLASHINFER_MATH_CUH_
#define FLASHINFER_RUNTIME_ASSERT(x) throw emulated::Fault(x)
// As from sm_90 on. Without it the template writes a fragment to shared memory and reads it back with no
// __syncwarp() between, counting on lanes that run in step; those here do not.
#define FLASHINFER_STMATRIX_M8N8X4_ENABLED

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace flashinfer {

namespace cp_async {

enum class SharedMemFillMode { kFillZero, kNoFill };
enum class PrefetchMode { kNoPrefetch, kPrefetch };

// A copy is done at once. What a missing wait would read too early is not found here.
inline void commit_group() {}
template <size_t n>
void wait_group() {}

inline void copy(void* smem, const void* gmem, size_t bytes, bool predicate, bool zero) {
  if (predicate) {
    std::memcpy(smem, gmem, bytes);
  } else if (zero) {
    std::memset(smem, 0, bytes);
  }
}

template <PrefetchMode, typename T>
void load_128b(T* smem, const T* gmem) {
  copy(smem, gmem, 16, true, false);
}
template <PrefetchMode, SharedMemFillMode fill, typename T>
void pred_load_128b(T* smem, const T* gmem, bool predicate) {
  copy(smem, gmem, 16, predicate, fill == SharedMemFillMode::kFillZero);
}
template <size_t bits, PrefetchMode, typename T>
void load(T* smem, const T* gmem) {
  copy(smem, gmem, bits / 8, true, false);
}
template <size_t bits, PrefetchMode, SharedMemFillMode fill, typename T>
void pred_load(T* smem, const T* gmem, bool predicate) {
  copy(smem, gmem, bits / 8, predicate, fill == SharedMemFillMode::kFillZero);
}
template <PrefetchMode, SharedMemFillMode fill, typename T>
void pred_load_128b_from_64b(T* smem, const T* gmem, bool predicate) {
  copy(smem, gmem, 8, predicate, fill == SharedMemFillMode::kFillZero);
}
template <SharedMemFillMode fill>
void pred_load_32b(uint32_t* smem, const uint32_t* gmem, bool predicate) {
  copy(smem, gmem, 4, predicate, fill == SharedMemFillMode::kFillZero);
}

}  // namespace cp_async

namespace math {

constexpr float log2e = 1.44269504088896340736f;
constexpr float loge2 = 0.693147180559945309417f;
constexpr float inf = 5e4;  // FlashInfer's stand-in for infinity

inline float ptx_exp2(float x) { return std::exp2(x); }
inline float ptx_log2(float x) { return std::log2(x); }
inline float ptx_rcp(float x) { return 1.f / x; }
inline float rsqrt(float x) { return 1.f / std::sqrt(x); }
inline float tanh(float x) { return std::tanh(x); }
inline half2 ptx_exp2(half2) { throw emulated::Fault("fp16 logits are not emulated"); }
inline half2 shfl_xor_sync(half2 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
inline float shfl_xor_sync(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

}  // namespace math

namespace mma {

enum class MMAMode { kInit = 0, kInplaceUpdate = 1 };

using Word = uint32_t;

// What a warp works on together: each lane's words, seen by all. Lanes leave only when all have read.
template <int N>
struct Warp {
  Word words[32][N];

  explicit Warp(const Word* mine) {
    for (int n = 0; n < N; ++n) {
      const uint64_t* slots = emulated::exchange(0xffffffffu, mine[n]);
      for (uint32_t lane = 0; lane < 32; ++lane) words[lane][n] = emulated::read<Word>(slots, lane);
    }
  }
};

inline void leave_together() { (void)emulated::exchange(0xffffffffu, 0); }

inline uint16_t half_of(Word word, int which) { return static_cast<uint16_t>(word >> 16 * which); }

// ldmatrix: lane 8 m + r names row r of matrix m, 8 elements of 16 bits. Lane l receives elements
// 2 (l % 4) and the next of row l / 4 of each matrix that is asked for; transposed, row and element change
// places.
template <bool transposed, uint32_t... matrices, typename T>
void load_matrices(Word* R, const T* row) {
  const uint64_t* slots = emulated::exchange(0xffffffffu, row);
  const uint16_t* rows[32];
  for (uint32_t lane = 0; lane < 32; ++lane) rows[lane] = emulated::read<const uint16_t*>(slots, lane);
  const uint32_t lane = emulated::Block::current->lane();
  const auto element = [&](uint32_t matrix, uint32_t i) {
    const uint32_t r = lane / 4, c = 2 * (lane % 4) + i;
    return static_cast<Word>(transposed ? rows[8 * matrix + c][r] : rows[8 * matrix + r][c]);
  };
  ((*R++ = element(matrices, 0) | element(matrices, 1) << 16), ...);
  leave_together();
}

template <typename T>
void ldmatrix_m8n8x4(Word* R, T* row) {
  load_matrices<false, 0, 1, 2, 3>(R, row);
}
template <typename T>
void ldmatrix_m8n8x4_left_half(Word* R, T* row) {
  load_matrices<false, 0, 2>(R, row);
}
template <typename T>
void ldmatrix_m8n8x4_right_half(Word* R, T* row) {
  load_matrices<false, 1, 3>(R, row);
}
template <typename T>
void ldmatrix_m8n8x4_trans(Word* R, T* row) {
  load_matrices<true, 0, 1, 2, 3>(R, row);
}
template <typename T>
void ldmatrix_m8n8x4_trans_left_half(Word* R, T* row) {
  load_matrices<true, 0, 1>(R, row);
}
template <typename T>
void ldmatrix_m8n8x4_trans_right_half(Word* R, T* row) {
  load_matrices<true, 2, 3>(R, row);
}

// stmatrix: the reverse of ldmatrix.
template <typename T>
void stmatrix_m8n8x4(Word* R, T* row) {
  const Warp<4> warp(R);
  const uint32_t lane = emulated::Block::current->lane();
  auto* to = reinterpret_cast<uint16_t*>(row);
  for (uint32_t c = 0; c < 8; ++c) {
    to[c] = half_of(warp.words[(lane % 8) * 4 + c / 2][lane / 8], c % 2);
  }
  leave_together();
}

template <typename T>
float number(uint16_t bits) {
  if constexpr (std::is_same_v<T, half>) {
    return __half2float(reinterpret_cast<const half&>(bits));
  } else {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16&>(bits));
  }
}

// Element (row, k) of an m16 x k16 matrix in four words a lane (PTX ISA, fragments of mma.m16n8k16).
template <typename T, int N>
float left(const Warp<N>& warp, uint32_t row, uint32_t k) {
  return number<T>(half_of(warp.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2));
}

// m16n16k16 as two m16n8k16: words 0, 1 of B and 2, 3 are those of columns 0 to 7 and 8 to 15.
template <typename T, MMAMode mode = MMAMode::kInplaceUpdate>
void mma_sync_m16n16k16_row_col_f16f16f32(float* C, Word* A, Word* B) {
  const Warp<4> a(A), b(B);
  const uint32_t lane = emulated::Block::current->lane();
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t row = lane / 4 + i % 4 / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = mode == MMAMode::kInit ? 0.f : C[i];
    for (uint32_t k = 0; k < 16; ++k) {
      const Word word = b.words[column * 4 + k % 8 / 2][i / 4 * 2 + k / 8];
      sum += left<T>(a, row, k) * number<T>(half_of(word, k % 2));
    }
    C[i] = sum;
  }
}

template <typename DType>
void m16k16_rowsum_f16f16f32(float* d, DType* s) {
  const Warp<4> a(reinterpret_cast<Word*>(s));
  const uint32_t lane = emulated::Block::current->lane();
  for (uint32_t i = 0; i < 2; ++i) {
    for (uint32_t k = 0; k < 16; ++k) d[i] += left<DType>(a, lane / 4 + 8 * i, k);
  }
}

template <MMAMode mode = MMAMode::kInplaceUpdate>
void mma_sync_m16n16k16_row_col_f16f16f16(Word*, Word*, Word*) {
  throw emulated::Fault("fp16 accumulators are not emulated");
}

}  // namespace mma
}  // namespace flashinfer
