// FlashInfer's wrappers of PTX (mma.cuh, cp_async.cuh, math.cuh) on emulated warps: the same names and
// arguments, written from the PTX ISA's descriptions of the instructions. Included in their place, with their
// include guards defined. Only what csrc/stream.cuh uses.
#pragma once

#define FLASHINFER_MMA_CUH_
#define FLASHINFER_CP_ASYNC_CUH_
#define FLASHINFER_MATH_CUH_

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

inline void commit_group() { emulated::Block::current->commit_copies(); }
template <size_t n>
void wait_group() {
  emulated::Block::current->wait_copies(n);
}

template <PrefetchMode, SharedMemFillMode fill, typename T>
void pred_load_128b(T* smem, const T* gmem, bool predicate) {
  emulated::Block::current->copy_later([=] {
    if (predicate) {
      std::memcpy(smem, gmem, 16);
    } else if (fill == SharedMemFillMode::kFillZero) {
      std::memset(smem, 0, 16);
    }
  });
}

}  // namespace cp_async

namespace math {

constexpr float log2e = 1.44269504088896340736f;

inline float ptx_exp2(float x) { return std::exp2(x); }
inline float ptx_log2(float x) { return std::log2(x); }
inline float ptx_rcp(float x) { return 1.f / x; }

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
void ldmatrix_m8n8x4_trans(Word* R, T* row) {
  load_matrices<true, 0, 1, 2, 3>(R, row);
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

}  // namespace mma
}  // namespace flashinfer
