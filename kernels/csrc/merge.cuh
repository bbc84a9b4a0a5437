// Merges the partial outputs of a split-KV plan.
//
// Row r of head h has `count` partial outputs with base-2 LSEs s_c; the result is their mean with
// weights 2^(s_c - max). FlashInfer has such a kernel, with an indptr per row and -5e4 standing in
// for minus infinity; this one reads the planner's MergeRow, treats a true -inf as "saw nothing"
// (so a fully masked row ends as zeros and LSE -inf and never as NaN), skips rows that belong to
// no request, leaves the output alone if the plan splits no request, and takes one warp per (row, head)
// where there are many of them and up to 16 where there are few.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "planner.cuh"

namespace spec_mask {

template <typename T>
struct alignas(16) Pack8 {
  T x[8];
};

struct MergeState {
  float m;       // largest LSE so far
  float d;       // sum of weights relative to m
  float acc[8];  // weighted sum of 8 output elements

  __device__ __forceinline__ void reset() {
    m = -INFINITY;
    d = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = 0.f;
  }

  __device__ __forceinline__ void add(float other_m, float other_d, const float (&other)[8]) {
    const float top = fmaxf(m, other_m);
    if (top == -INFINITY) return;  // -inf - -inf would be NaN
    const float a = exp2f(m - top), b = exp2f(other_m - top);
    m = top;
    d = d * a + other_d * b;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = acc[i] * a + other[i] * b;
  }
};

// WARPS warps work on one (row, head); a block has at least 4 warps.
template <int WARPS>
struct MergeShape {
  static constexpr int kPairs = WARPS >= 4 ? 1 : 4 / WARPS;  // (row, head) pairs per block
  static constexpr int kThreads = 32 * WARPS * kPairs;
};

template <int HEAD_DIM, int WARPS, typename DTypeO>
__global__ void __launch_bounds__(MergeShape<WARPS>::kThreads)
    merge_partials(const DTypeO* __restrict__ partial_o,    // [partial rows, heads, HEAD_DIM]
                   const float* __restrict__ partial_lse,   // [partial rows, heads]
                   const PlanHeader* __restrict__ header,
                   const MergeRow* __restrict__ merge_rows,  // [num_rows]
                   DTypeO* __restrict__ o,                  // [num_rows, heads, HEAD_DIM]
                   float* __restrict__ lse,                 // [num_rows, heads] or null
                   int32_t num_rows, int32_t num_heads) {
  constexpr int kLanes = HEAD_DIM / 8;         // lanes holding one output row, 16 bytes each
  constexpr int kPerWarp = 32 / kLanes;        // chunks a warp reads at once
  constexpr int kParallel = kPerWarp * WARPS;  // chunks read at once
  static_assert(32 % kLanes == 0, "head_dim must be 64, 128 or 256");

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t pair =
      static_cast<int64_t>(blockIdx.x) * MergeShape<WARPS>::kPairs + warp / WARPS;
  if (pair >= static_cast<int64_t>(num_rows) * num_heads) return;
  const int32_t row = static_cast<int32_t>(pair / num_heads);
  const int32_t head = static_cast<int32_t>(pair % num_heads);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Launched while the attention kernel still runs (programmatic dependent launch): nothing that
  // it or the planner writes may be read above this line.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const MergeRow parts = merge_rows[row];
  if (header->direct != 0) {
    // The output is in its place and the LSEs are in its order.
    if (lse != nullptr && parts.count != 0 && warp % WARPS == 0 && lane == 0) {
      lse[pair] = partial_lse[pair];
    }
    return;
  }
  if (parts.count == 0) return;

  const int part = (warp % WARPS) * kPerWarp + lane / kLanes;
  const int column = (lane % kLanes) * 8;

  MergeState state;
  state.reset();
#pragma unroll 4
  for (int32_t c = part; c < parts.count; c += kParallel) {
    const int64_t at = static_cast<int64_t>(parts.first + c) * num_heads + head;
    const float s = partial_lse[at];
    const Pack8<DTypeO> v = *reinterpret_cast<const Pack8<DTypeO>*>(partial_o + at * HEAD_DIM + column);
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(v.x[i]);
    state.add(s, 1.f, x);
  }

#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
    float other[8];
    const float other_m = __shfl_xor_sync(0xffffffffu, state.m, offset);
    const float other_d = __shfl_xor_sync(0xffffffffu, state.d, offset);
#pragma unroll
    for (int i = 0; i < 8; ++i) other[i] = __shfl_xor_sync(0xffffffffu, state.acc[i], offset);
    state.add(other_m, other_d, other);
  }

  if constexpr (WARPS > 1) {
    __shared__ float smem_acc[WARPS][HEAD_DIM];
    __shared__ float smem_m[WARPS], smem_d[WARPS];
    if (lane < kLanes) {
#pragma unroll
      for (int i = 0; i < 8; ++i) smem_acc[warp][column + i] = state.acc[i];
    }
    if (lane == 0) {
      smem_m[warp] = state.m;
      smem_d[warp] = state.d;
    }
    __syncthreads();
    if (warp != 0) return;
    state.reset();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float other[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) other[i] = smem_acc[w][column + i];
      state.add(smem_m[w], smem_d[w], other);
    }
  }

  if (lane < kLanes) {
    const float inverse = state.d > 0.f ? 1.f / state.d : 0.f;
    Pack8<DTypeO> v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] = static_cast<DTypeO>(state.acc[i] * inverse);
    const int64_t at = static_cast<int64_t>(row) * num_heads + head;
    *reinterpret_cast<Pack8<DTypeO>*>(o + at * HEAD_DIM + column) = v;
    if (lse != nullptr && lane == 0) {
      lse[at] = state.d > 0.f ? state.m + log2f(state.d) : -INFINITY;
    }
  }
}

}  // namespace spec_mask
