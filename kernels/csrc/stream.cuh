// Verify attention of our own: every group of warps streams its own tokens through shared memory.
//
// FlashInfer's FA2 template is a prefill kernel. At the few rows of a verify step it is bound by what it does
// besides reading the cache: four barriers of the whole block per KV tile, one KV tile in flight, query tiles
// that are filled up to 64 rows, and fp8 tiles that are converted in a pass of their own (on an H200 an fp8 cache
// was no faster than one of twice the bytes). Here
//
//   - warps split the tokens, not the rows, wherever the rows fit a warp. Such a warp copies (cp.async), waits
//     and computes by itself: there is no barrier in its main loop but its own __syncwarp(). Where they do
//     not fit, the query warps of a group share its tokens and meet at one barrier of their own per tile;
//   - the next tile is on its way while one is computed, in four warps of two blocks each;
//   - fp8 elements go from shared memory to registers as they are, and become fp16 there: two for one
//     instruction from sm_89 on. Q takes their order: no lane ever needs an element of another one;
//   - the running maximum is raised, and the output rescaled, only when a weight would pass 2^8 (as FlashAttention-4
//     does): elsewhere neither needs a shuffle or a multiplication. The result is exact: what is divided by is
//     the sum of the same weights;
//   - masks, also those of any bits, are looked at only in tiles that reach into the draft block, past the
//     end or before the window.
//
// Tiles of tokens lie in the request's page table in any way: a lane looks up one token of the next tile while
// the current one is computed.
//
// PTX (ldmatrix, mma, cp.async) comes through FlashInfer's wrappers.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <flashinfer/cp_async.cuh>
#include <flashinfer/math.cuh>
#include <flashinfer/mma.cuh>
#include <type_traits>

#include "params.cuh"

namespace spec_mask {

// The layout of one query tile. The output of a warp is what limits its rows: 128 registers, as 16 rows of 256
// elements, 32 of 128 or 64 of 64. Warps beyond that (kWarpsQ) each read all of the group's tile, and convert it if
// it is fp8. To let two warps share rows instead (each multiplies half of the keys, and all weights, through
// shared memory, by half the elements of the values) was tried: it reads and converts once for 64 rows of 128, and its
// second barrier per tile made it 10 to 20% slower for bf16 and up to 25% for fp8 (H200).
template <uint32_t TILE_Q>
struct StreamLayout {
  static constexpr uint32_t kRows = TILE_Q;
  static constexpr bool kFp8 = sizeof(DTypeKV) == 1;

  // Bytes of a row in shared memory: a power of two, so that a few bits of the row number, XORed into the
  // number of a 16-byte chunk, spread 8 rows over all banks.
  static constexpr uint32_t pitch(uint32_t bytes) {
    uint32_t p = 64;
    while (p < bytes) p *= 2;
    return p;
  }
  static constexpr uint32_t kPitchKv = pitch(kHeadDim * sizeof(DTypeKV));
  static constexpr uint32_t kPitchQ = pitch(kHeadDim * 2);

  // What the warps leave each other at the end: the sums of each group, and per row a maximum and a sum.
  static constexpr uint32_t kPad = kFp8 ? 16 : 8;  // floats, so that rows start in different banks
  static constexpr uint32_t kSumPitch = kHeadDim + kPad;

  static constexpr uint32_t stage_bytes(uint32_t groups, uint32_t tokens) {
    return 2 * groups * tokens * kPitchKv;  // K, then V, of each group
  }
  static constexpr uint32_t row_bytes(uint32_t groups) { return 4 * kRows * (2 * groups + 1); }
  static constexpr uint32_t smem(uint32_t groups, uint32_t tokens, uint32_t stages) {
    const uint32_t loop = stages * stage_bytes(groups, tokens) + kRows * kPitchQ;
    const uint32_t sums = groups > 1 ? 4 * groups * kRows * kSumPitch : 0;
    return (loop > sums ? loop : sums) + row_bytes(groups);
  }
  // Each resident block costs 1 KB of shared memory on top of its own.
  static constexpr bool fits(uint32_t groups, uint32_t tokens, uint32_t stages, uint32_t ctas) {
    const uint32_t bytes = smem(groups, tokens, stages);
    return bytes <= kSmemPerBlock && ctas * (bytes + 1024) <= kSmemPerSm;
  }

  // Rows of one warp. Two warps of 16 rows each read a tile twice, but make half as many groups, whose sums are added
  // at the end: with 32 rows of a 16-bit cache 4 to 9% faster up to 16 MB, 1 to 5% above (H200). With fp8, each
  // converts all of the tile: up to 30% slower. Nor did 64 rows gain: 5% faster for one request, 10% slower for 32.
  static constexpr uint32_t most_rows() {
    if (kHeadDim > 128) return 16;
    if (kHeadDim > 64) return TILE_Q == 32 && !kFp8 ? 16 : 32;
    return 64;
  }
  static constexpr uint32_t kMostRows = most_rows();
  static constexpr uint32_t kMmaQ = (kMostRows < TILE_Q ? kMostRows : TILE_Q) / 16;
  static constexpr uint32_t kWarpsQ = TILE_Q / (16 * kMmaQ);

  // Groups: as many as make four warps, or as shared memory has room for.
  static constexpr uint32_t pick_groups() {
    uint32_t groups = kWarpsQ >= 4 ? 1 : 4 / kWarpsQ;
    while (groups > 1 && !fits(groups, 16, 2, 1)) groups /= 2;
    return groups;
  }
  static constexpr uint32_t kWarpsKv = pick_groups();
  static constexpr uint32_t kThreads = 32 * kWarpsQ * kWarpsKv;

  // Tokens of a group's tile. 32 halve what is paid per tile; 16 leave room for a second block, or registers.
  static constexpr uint32_t pick_tokens() {
    return kMmaQ < 4 && kPitchKv * kWarpsKv < 1024 && fits(kWarpsKv, 32, 2, 1) ? 32 : 16;
  }
  static constexpr uint32_t kTokens = pick_tokens();
  static constexpr uint32_t kTileKv = kTokens * kWarpsKv;

  // Tiles in shared memory, of which all but one are on their way. Two blocks per multiprocessor hide each
  // other's start and end, and two tiles of each were faster than three or four (H200); one block needs more.
  static constexpr bool kTwoBlocks = fits(kWarpsKv, kTokens, 2, 2);
  static constexpr uint32_t most_stages() {
    for (uint32_t stages = 4; stages > 2; --stages) {
      if (fits(kWarpsKv, kTokens, stages, 1)) return stages;
    }
    return fits(kWarpsKv, kTokens, 2, 1) ? 2 : 0;
  }
  static constexpr uint32_t kStages = kTwoBlocks ? 2 : most_stages();
  static_assert(kStages >= 2, "no KV tile of this head_dim and query tile fits the shared memory of the target");
  static constexpr uint32_t kStageBytes = stage_bytes(kWarpsKv, kTokens);
  static constexpr uint32_t kRowBytes = row_bytes(kWarpsKv);
  // A third block would read from yet more places at once: 2 to 17% slower with 16 rows of bf16 (H200, 20
  // requests and more of 8192 tokens and more). It is kept out by shared memory that nobody uses.
  static constexpr uint32_t kThird = (kSmemPerSm / 3 + 15) / 16 * 16;
  static constexpr uint32_t kUsed = smem(kWarpsKv, kTokens, kStages);
  static constexpr uint32_t kSmem = kTwoBlocks && kUsed < kThird ? kThird : kUsed;
  static_assert(kSmem <= kSmemPerBlock, "more tokens or stages than shared memory has room for");
};

// From four one-byte elements two words of two fp16 elements each. Of values, those at even places and those at
// odd ones: ldmatrix gives a lane two neighbouring elements of two tokens, and the mma wants one of two tokens. Of
// keys, whatever is cheapest, as long as the query has the same order: order_query() changes 16 elements of it.
//
// e4m3 comes out 2^-kShift of its value where no instruction converts it: fp16 has one exponent bit more, a
// bias that is 8 larger, and else the same order, so that sign, exponent and mantissa only move; subnormal numbers
// too. NaN becomes a number then. Where the instruction exists this is no faster, though it takes ordinary
// operations only: 2% slower with 16 rows, 10 to 30% with more (H200).
template <typename T>
struct Fp8Words {
  static constexpr int kShift = std::is_same_v<T, __nv_fp8_e4m3> && SPEC_MASK_SM < 89 ? 8 : 0;

  static __device__ __forceinline__ void values(uint32_t x, uint32_t& even, uint32_t& odd) {
    if constexpr (std::is_same_v<T, __nv_fp8_e5m2>) {  // the upper half of fp16
      even = __byte_perm(x, 0, 0x2404);
      odd = x & 0xff00ff00u;
    } else if constexpr (SPEC_MASK_SM >= 89) {
      even = convert(__byte_perm(x, 0, 0x4420));
      odd = convert(__byte_perm(x, 0, 0x4431));
    } else {
      odd = (x & 0x80008000u) | (x >> 1 & 0x3f803f80u);
      x <<= 8;
      even = (x & 0x80008000u) | (x >> 1 & 0x3f803f80u);
    }
  }

  static __device__ __forceinline__ void keys(uint32_t x, uint32_t& first, uint32_t& second) {
    if constexpr (kInOrder) {
      first = convert(x);
      second = convert(x >> 16);
    } else {
      values(x, first, second);
    }
  }

  // A lane's four neighbouring elements of a key are multiplied by those 2 j, 2 j + 1, 8 + 2 j and 9 + 2 j of 16.
  static __device__ __forceinline__ void order_query(uint32_t (&x)[8]) {
    uint32_t y[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      y[k] = kInOrder ? x[2 * k] : __byte_perm(x[2 * k], x[2 * k + 1], 0x5410);
      y[4 + k] = kInOrder ? x[2 * k + 1] : __byte_perm(x[2 * k], x[2 * k + 1], 0x7632);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = y[k];
  }

 private:
  static constexpr bool kInOrder = std::is_same_v<T, __nv_fp8_e4m3> && SPEC_MASK_SM >= 89;

  // Two elements in the lower half.
  static __device__ __forceinline__ uint32_t convert(uint32_t x) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(x & 0xffffu), __NV_E4M3);
    return static_cast<uint32_t>(h.x) | static_cast<uint32_t>(h.y) << 16;
  }
};

template <MaskMode MODE, uint32_t TILE_Q>
struct StreamKernel : StreamLayout<TILE_Q> {
  using L = StreamLayout<TILE_Q>;
  using L::kFp8, L::kMmaQ, L::kPitchKv, L::kPitchQ, L::kRows, L::kStages, L::kSumPitch, L::kThreads, L::kTileKv,
      L::kTokens, L::kWarpsKv, L::kWarpsQ;
  using Mma = std::conditional_t<kFp8, half, DTypeQ>;  // what is multiplied
  using KvWords = Fp8Words<DTypeKV>;

  static constexpr bool kCausal = MODE == MaskMode::kCausal;
  static constexpr bool kWords = MODE == MaskMode::kBits || (kCausal && kCausalWords);
  static constexpr uint32_t kMmaKv = kTokens / 16;
  static constexpr uint32_t kSteps = kHeadDim / 16;
  static constexpr uint32_t kChunksKv = kHeadDim * sizeof(DTypeKV) / 16;  // 16-byte chunks of a row
  static constexpr bool kQueryInRegisters = kMmaQ == 1 && kHeadDim <= 128;
  // Queries of bf16 become fp16 for an fp8 cache, scaled to its range row by row.
  static constexpr bool kScaledQ = kFp8 && !std::is_same_v<DTypeQ, half>;

  // A base-2 logit that is larger than the running maximum by more than this raises it.
  static constexpr float kSlack = 8.f;
  // Below any logit, and finite: minus infinity less this is still minus infinity.
  static constexpr float kLowest = -1e30f;

  using Fragments = uint32_t[kMmaQ][4];
  using Logits = float[kMmaQ][kMmaKv][8];
  using Rows = float[kMmaQ][2];  // one number for each row of which this lane has elements

  const Params& p;
  uint8_t* const smem;
  const uint32_t head, lane, warp_q, group;
  // Of the request, in tokens and rows.
  int32_t block0;       // first token of the draft block; negative where the query is longer than the cache
  int32_t begin, end;   // tokens of this block
  int32_t qo_len, tile_row0, first_row, last_row;  // tile_row0: packed; the other two: query rows
  const int32_t* table;

  float o[kMmaQ][kSteps][8];
  Rows m, d;

  __device__ __forceinline__ StreamKernel(const Params& params, uint8_t* storage)
      : p(params),
        smem(storage),
        head(blockIdx.x % params.num_kv_heads),
        lane(threadIdx.x % 32),
        warp_q(threadIdx.x / 32 % kWarpsQ),
        group(threadIdx.x / 32 / kWarpsQ) {}

  __device__ __forceinline__ uint8_t* stage(uint32_t number) const {
    return smem + (number * kWarpsKv + group) * (2 * kTokens * kPitchKv);
  }
  __device__ __forceinline__ uint8_t* query() const { return smem + kStages * L::kStageBytes; }
  // Of the tile's rows, this warp's first, and that of element 2 j and the next of this lane's products.
  __device__ __forceinline__ uint32_t warp_row0() const { return warp_q * kMmaQ * 16; }
  __device__ __forceinline__ uint32_t row_of(uint32_t q, uint32_t j) const {
    return warp_row0() + q * 16 + j * 8 + lane / 4;
  }
  __device__ __forceinline__ float* row_numbers() const {
    return reinterpret_cast<float*>(smem + L::kUsed - L::kRowBytes);
  }

  // Where chunk `chunk + step` of row `row + later` lies in a tile with this pitch: the chunk's number is XORed
  // with some bits of the row's. `step` and `later` are known when compiling, and have no bit in common with the
  // other two: the addresses of an unrolled loop differ by constants, and few of them are XORed.
  template <uint32_t PITCH>
  static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t chunk, uint32_t step = 0,
                                                   uint32_t later = 0) {
    constexpr uint32_t kMask = PITCH == 64 ? 3 : 7, kShift = PITCH == 64 ? 1 : 0;
    const uint32_t mixed = chunk ^ (row >> kShift & kMask);
    return row * PITCH + later * PITCH + 16 * ((mixed ^ (step & kMask) ^ (later >> kShift & kMask)) + (step & ~kMask));
  }

  __device__ __forceinline__ void group_barrier() const {
    if constexpr (kWarpsQ == 1) {
      __syncwarp();
    } else {
#if defined(__CUDACC__)
      // A barrier of each group's own: all warps of a block at one is 2% slower with fp8 (H200).
      asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * kWarpsQ) : "memory");
#else
      __syncthreads();  // all groups have as many tiles
#endif
    }
  }

  // --- the cache ---------------------------------------------------------------------------------

  __device__ __forceinline__ int32_t tile_begin(uint32_t tile) const {
    return begin + static_cast<int32_t>((tile * kWarpsKv + group) * kTokens);
  }

  // A token's entry in the page table, and its place in the page. What is read from the table is not looked at
  // here: several of these are on their way at once.
  struct Token {
    int32_t page;
    uint32_t entry;
  };

  // This lane's token of a tile. The table's entries past the request's last token belong to nobody: it stands for
  // those there, and is not copied. The block must have tokens.
  __device__ __forceinline__ Token find_token(uint32_t tile) const {
    const int32_t token = min(tile_begin(tile) + static_cast<int32_t>(lane % kTokens), end - 1);
    uint32_t page, entry;
    p.page_size.divmod(static_cast<uint32_t>(token), page, entry);
    return {__ldg(table + page), entry};
  }

  // Starts copies of a tile's keys and values. Tokens past the end become zeros: what lies in unused slots
  // may be NaN, and NaN times a weight of zero is NaN.
  __device__ __forceinline__ void copy_tile(uint32_t tile, uint8_t* to, const Token& token) const {
    using flashinfer::cp_async::PrefetchMode;
    using flashinfer::cp_async::SharedMemFillMode;
    constexpr uint32_t kGroupThreads = 32 * kWarpsQ;
    constexpr uint32_t kLanes = kPitchKv / 16;  // of a row; with head_dim 96 a quarter of them idles
    constexpr uint32_t kCopies = kTokens * kLanes;
    static_assert(kCopies % kGroupThreads == 0);
    // In units of kv_unit bytes.
    const uint32_t where = static_cast<uint32_t>(token.page) * p.kv_page_units + token.entry * p.kv_token_units;
    const uint32_t thread = threadIdx.x % kGroupThreads, chunk = thread % kLanes, row = thread / kLanes;
    // Of the rows that this thread copies parts of, those before this one exist.
    const int32_t rows = end - tile_begin(tile) - static_cast<int32_t>(row);
    const uint64_t start = static_cast<uint64_t>(head) * p.kv_head_bytes + 16 * chunk;
    const uint8_t* k = reinterpret_cast<const uint8_t*>(p.k_cache) + start;
    const uint8_t* v = reinterpret_cast<const uint8_t*>(p.v_cache) + start;
#pragma unroll
    for (uint32_t later = 0; later < kTokens; later += kGroupThreads / kLanes) {
      const uint64_t at = static_cast<uint64_t>(__shfl_sync(0xffffffffu, where, static_cast<int>(row + later))) *
                          p.kv_unit;
      const bool valid = static_cast<int32_t>(later) < rows;
      if (kLanes == kChunksKv || chunk < kChunksKv) {
        uint8_t* to_row = to + place<kPitchKv>(row, chunk, 0, later);
        flashinfer::cp_async::pred_load_128b<PrefetchMode::kPrefetch, SharedMemFillMode::kFillZero>(to_row, k + at,
                                                                                                    valid);
        flashinfer::cp_async::pred_load_128b<PrefetchMode::kPrefetch, SharedMemFillMode::kFillZero>(
            to_row + kTokens * kPitchKv, v + at, valid);
      }
    }
  }

  // --- the query ---------------------------------------------------------------------------------

  static constexpr uint32_t kLanesQ = kPitchQ / 32;  // of a row; each has 16 elements
  static constexpr uint32_t kPartsQ = (kRows * kLanesQ + kThreads - 1) / kThreads;  // of a thread
  static_assert(kRows * kLanesQ % 32 == 0, "all lanes of a warp have a part, or none");
  using QueryParts = uint32_t[kPartsQ][8];

  // This thread's parts of the tile's rows: zeros where there is no row.
  __device__ __forceinline__ void read_query(QueryParts& x, int32_t row0) const {
#pragma unroll
    for (uint32_t n = 0; n < kPartsQ; ++n) {
      const uint32_t i = n * kThreads + threadIdx.x, row = i / kLanesQ, part = i % kLanesQ;
      uint32_t q, r;
      p.group_size.divmod(tile_row0 + row, q, r);
      uint4 a = make_uint4(0, 0, 0, 0), b = a;
      if (row < kRows && static_cast<int32_t>(q) < qo_len && part < kSteps) {
        const DTypeQ* from = p.q + static_cast<int64_t>(row0 + q) * p.q_stride_row +
                             static_cast<int64_t>(head * p.group_size + r) * p.q_stride_head + part * 16;
        a = *reinterpret_cast<const uint4*>(from);
        b = *reinterpret_cast<const uint4*>(from + 8);
      }
      x[n][0] = a.x, x[n][1] = a.y, x[n][2] = a.z, x[n][3] = a.w;
      x[n][4] = b.x, x[n][5] = b.y, x[n][6] = b.z, x[n][7] = b.w;
    }
  }

  __device__ __forceinline__ void store_query(QueryParts& x) const {
#pragma unroll
    for (uint32_t n = 0; n < kPartsQ; ++n) {
      const uint32_t i = n * kThreads + threadIdx.x, row = i / kLanesQ, part = i % kLanesQ;
      if (row >= kRows) break;
      if constexpr (kScaledQ) {
        const float scale = scale_row<kLanesQ>(x[n]);
        if (part == 0) row_numbers()[row] = 1.f / scale;
      }
      if constexpr (kFp8) KvWords::order_query(x[n]);
      const uint32_t(&y)[8] = x[n];
      *reinterpret_cast<uint4*>(query() + place<kPitchQ>(row, 2 * part)) = make_uint4(y[0], y[1], y[2], y[3]);
      *reinterpret_cast<uint4*>(query() + place<kPitchQ>(row, 2 * part + 1)) = make_uint4(y[4], y[5], y[6], y[7]);
    }
  }

  // Makes bf16 elements fp16, times a power of two that brings the row's largest below 2^15: then no element
  // is too large, and one that loses bits is 2^-31 of the largest. Returns that power.
  template <uint32_t LANES>
  static __device__ __forceinline__ float scale_row(uint32_t (&x)[8]) {
    float values[16], most = 0.f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      values[2 * k] = __uint_as_float(x[k] << 16);
      values[2 * k + 1] = __uint_as_float(x[k] & 0xffff0000u);
      most = fmaxf(most, fmaxf(fabsf(values[2 * k]), fabsf(values[2 * k + 1])));
    }
#pragma unroll
    for (uint32_t lanes = 1; lanes < LANES; lanes *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, static_cast<int>(lanes)));
    }
    // 2^14 over the largest power of two in it, kept within what a float's exponent can say.
    const int32_t exponent = static_cast<int32_t>(__float_as_uint(most) >> 23) - 127;
    const int32_t power = max(-126, min(100, 14 - exponent));
    const float scale = __uint_as_float(static_cast<uint32_t>(power + 127) << 23);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const half2 h = __floats2half2_rn(values[2 * k] * scale, values[2 * k + 1] * scale);
      x[k] = reinterpret_cast<const uint32_t&>(h);
    }
    return scale;
  }

  __device__ __forceinline__ void query_fragments(uint32_t step, Fragments& a) const {
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
      flashinfer::mma::ldmatrix_m8n8x4(a[q], query() + (warp_row0() + q * 16) * kPitchQ +
                                                 place<kPitchQ>(lane % 16, lane / 16, 2 * step));
    }
  }

  // --- one tile ----------------------------------------------------------------------------------

  static __device__ __forceinline__ void multiply(float* c, uint32_t* a, uint32_t* b, bool init) {
    using flashinfer::mma::MMAMode;
    if (init) {
      flashinfer::mma::mma_sync_m16n16k16_row_col_f16f16f32<Mma, MMAMode::kInit>(c, a, b);
    } else {
      flashinfer::mma::mma_sync_m16n16k16_row_col_f16f16f32<Mma>(c, a, b);
    }
  }

  // s = q k^T, unscaled.
  __device__ __forceinline__ void score(uint8_t* k, const uint32_t (&held)[kQueryInRegisters ? kSteps : 1][4],
                                        Logits& s) const {
    constexpr uint32_t kStepsAtOnce = kFp8 ? 2 : 1;  // ldmatrix has 16 bytes of 16 tokens twice
#pragma unroll
    for (uint32_t step = 0; step < kSteps; step += kStepsAtOnce) {
      uint32_t words[kMmaKv][4];
#pragma unroll
      for (uint32_t t = 0; t < kMmaKv; ++t) {
        // Four blocks of 8 tokens and 16 bytes. 16-bit elements: both halves of the step for tokens 0 to 7, then
        // for 8 to 15. fp8: tokens 0 to 7 and 8 to 15 of this step, then of the next one.
        const uint32_t row = kFp8 ? lane % 16 : lane % 8 + lane / 16 * 8;
        const uint32_t chunk = kFp8 ? lane / 16 : lane / 8 % 2;
        flashinfer::mma::ldmatrix_m8n8x4(
            words[t], k + t * 16 * kPitchKv + place<kPitchKv>(row, chunk, kFp8 ? step : 2 * step));
      }
#pragma unroll
      for (uint32_t half_ = 0; half_ < kStepsAtOnce; ++half_) {
        Fragments a;
        if constexpr (kQueryInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[0][i] = held[step + half_][i];
        } else {
          query_fragments(step + half_, a);
        }
#pragma unroll
        for (uint32_t t = 0; t < kMmaKv; ++t) {
          uint32_t b[4];
          if constexpr (kFp8) {
            KvWords::keys(words[t][2 * half_], b[0], b[1]);
            KvWords::keys(words[t][2 * half_ + 1], b[2], b[3]);
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = words[t][i];
          }
#pragma unroll
          for (uint32_t q = 0; q < kMmaQ; ++q) multiply(s[q][t], a[q], b, step + half_ == 0);
        }
      }
    }
  }

  // o += weights v for 16 tokens, with the weights as mma takes them.
  __device__ __forceinline__ void gather(uint8_t* v, Fragments& a) {
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
      flashinfer::mma::m16k16_rowsum_f16f16f32(d[q], reinterpret_cast<Mma*>(a[q]));
    }
#pragma unroll
    for (uint32_t step = 0; step < kSteps; step += kFp8 ? 2 : 1) {
      uint32_t words[4];
      flashinfer::mma::ldmatrix_m8n8x4_trans(
          words, v + place<kPitchKv>(lane % 16, lane / 16, kFp8 ? step : 2 * step));
      if constexpr (kFp8) {
#pragma unroll
        for (uint32_t half_ = 0; half_ < 2; ++half_) {
          uint32_t b[4];
          KvWords::values(words[2 * half_], b[0], b[2]);
          KvWords::values(words[2 * half_ + 1], b[1], b[3]);
#pragma unroll
          for (uint32_t q = 0; q < kMmaQ; ++q) multiply(o[q][step + half_], a[q], b, false);
        }
      } else {
#pragma unroll
        for (uint32_t q = 0; q < kMmaQ; ++q) multiply(o[q][step], a[q], words, false);
      }
    }
  }

  static __device__ __forceinline__ uint32_t pack(float x, float y) { return pack_as<Mma>(x, y); }
  static __device__ __forceinline__ uint32_t pack_output(float x, float y) { return pack_as<DTypeQ>(x, y); }

  template <typename T>
  static __device__ __forceinline__ uint32_t pack_as(float x, float y) {
    if constexpr (std::is_same_v<T, half>) {
      const half2 h = __floats2half2_rn(x, y);
      return reinterpret_cast<const uint32_t&>(h);
    } else {
      const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
      return reinterpret_cast<const uint32_t&>(h);
    }
  }

  // Does some row of this tile not see all of its tokens?
  __device__ __forceinline__ bool is_masked(int32_t first) const {
    const int32_t last = first + static_cast<int32_t>(kTokens) - 1;
    bool masked = last >= end;
    if constexpr (kWords) {
      masked = masked || last >= block0;
    } else if constexpr (kCausal) {
      masked = masked || last > block0 + first_row;
    }
    if constexpr (kUseWindow) masked = masked || (p.window_left >= 0 && first < block0 + last_row - p.window_left);
    return masked;
  }

  __device__ __forceinline__ void mask(int32_t first, Logits& s) const {
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const int32_t row = static_cast<int32_t>((tile_row0 + row_of(q, j)) / p.group_size);
        uint64_t word = ~0ull;
        if constexpr (kWords) {
          if (p.mask_words != nullptr) word = row < qo_len ? __ldg(p.mask_words + p.plan.q_start[request] + row) : 0;
        }
#pragma unroll
        for (uint32_t t = 0; t < kMmaKv; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int32_t token = first + static_cast<int32_t>(t * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2);
            const int32_t place = token - block0;  // in the draft block; negative before it
            bool visible = token < end;
            if constexpr (kCausal) visible = visible && place <= row;
            if constexpr (kWords) visible = visible && (place < 0 || (word >> (place & 63) & 1) != 0);
            if constexpr (kUseWindow) visible = visible && (p.window_left < 0 || place + p.window_left >= row);
            float& x = s[q][t][i / 2 * 4 + j * 2 + i % 2];
            if (!visible) x = -INFINITY;
          }
        }
      }
    }
  }

  // tanh(x) = 1 - 2 / (exp(2x) + 1), exact to about 1e-7; tanh.approx is off by up to 5e-4, which a
  // soft cap of 50 turns into 2.5% of a probability. It saturates at both ends.
  __device__ __forceinline__ float capped(float x, float scale) const {
    const float e = flashinfer::math::ptx_exp2(x * scale);
    return flashinfer::math::log2e * p.logits_soft_cap * (1.f - 2.f * flashinfer::math::ptx_rcp(e + 1.f));
  }

  // The largest base-2 logit of this lane in each row. Is one far above the running maximum?
  // scale: of a row, from products to base-2 logits.
  __device__ __forceinline__ bool rises(const Logits& s, const Rows& scale, Rows& top) const {
    bool raise = false;
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        float most = -INFINITY;
#pragma unroll
        for (uint32_t t = 0; t < kMmaKv; ++t) {
          const float* x = s[q][t] + 2 * j;
          most = fmaxf(most, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[4], x[5])));
        }
        top[q][j] = most * scale[q][j];
        raise = raise || top[q][j] > m[q][j] + kSlack;
      }
    }
    return raise;
  }

  // Of the four lanes that have elements of a row.
  __device__ __forceinline__ void top_of_rows(Rows& top) const {
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        top[q][j] = fmaxf(top[q][j], __shfl_xor_sync(0xffffffffu, top[q][j], 1));
        top[q][j] = fmaxf(top[q][j], __shfl_xor_sync(0xffffffffu, top[q][j], 2));
      }
    }
  }

  __device__ __forceinline__ void raise_to(const Rows& top) {
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const float most = fmaxf(m[q][j], top[q][j]);
        const float factor = flashinfer::math::ptx_exp2(m[q][j] - most);
        m[q][j] = most;
        d[q][j] *= factor;
#pragma unroll
        for (uint32_t step = 0; step < kSteps; ++step) {
          float* x = o[q][step] + 2 * j;
          x[0] *= factor, x[1] *= factor, x[4] *= factor, x[5] *= factor;
        }
      }
    }
  }

  // Weights of 16 tokens, as the left side of an mma.
  __device__ __forceinline__ void weigh(const Logits& s, uint32_t t, const Rows& scale, Fragments& a) const {
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = i % 2;
        const float* x = s[q][t] + 2 * i;
        a[q][i] = pack(flashinfer::math::ptx_exp2(fmaf(x[0], scale[q][j], -m[q][j])),
                       flashinfer::math::ptx_exp2(fmaf(x[1], scale[q][j], -m[q][j])));
      }
    }
  }

  // Adds the values of one tile.
  __device__ __forceinline__ void attend(uint8_t* v, const Logits& s, const Rows& scale) {
    Rows top;
    if (__ballot_sync(0xffffffffu, rises(s, scale, top)) != 0) {
      top_of_rows(top);
      raise_to(top);
    }
#pragma unroll
    for (uint32_t t = 0; t < kMmaKv; ++t) {
      Fragments a;
      weigh(s, t, scale, a);
      gather(v + t * 16 * kPitchKv, a);
    }
  }

  // --- the block ---------------------------------------------------------------------------------

  uint32_t request, kv_chunk_index;

  // A read that stays where it is written: the compiler would put off those behind the first until it knows
  // whether they are needed.
  template <typename T>
  static __device__ __forceinline__ T read_now(const T* from) {
    return *static_cast<const volatile T*>(from);
  }

  __device__ __forceinline__ void run() {
    // What is read here in one go would otherwise be trips to memory one after the other. The lists hold request
    // numbers of earlier batches where this one has no entry.
    const uint32_t cta = blockIdx.x / p.num_kv_heads;
    const bool valid = read_now(p.plan.block_valid + cta);
    request = read_now(p.plan.request_indices + cta);
    kv_chunk_index = read_now(p.plan.kv_tile_indices + cta);
    const int32_t q_tile = read_now(p.plan.qo_tile_indices + cta);
    const int32_t kv_chunk = read_now(&p.plan.header->kv_chunk);
    if (!valid) return;
    qo_len = read_now(p.plan.q_len + request);
    const int32_t kv_len = read_now(p.plan.kv_len + request);
    const int32_t row0 = read_now(p.plan.q_start + request);
    table = p.page_table + static_cast<int64_t>(request) * p.page_table_stride;
    const int32_t group_size = static_cast<int32_t>(static_cast<uint32_t>(p.group_size));
    block0 = kv_len - qo_len;
    tile_row0 = q_tile * static_cast<int32_t>(kRows);
    first_row = static_cast<int32_t>(static_cast<uint32_t>(tile_row0) / p.group_size);
    last_row = min(qo_len - 1, static_cast<int32_t>((static_cast<uint32_t>(tile_row0) + kRows - 1) / p.group_size));

    // The request's tokens, its chunk of them, and of those what some row sees.
    int32_t kv_begin = 0;
    if constexpr (kUseWindow) {
      if (p.window_left >= 0) kv_begin = max(0, block0 + first_row - p.window_left);
    }
    begin = kv_begin;
    end = kv_len;
    if (p.partition_kv) {
      begin = min(kv_begin + static_cast<int32_t>(kv_chunk_index) * kv_chunk, kv_len);
      end = min(begin + kv_chunk, kv_len);
    }
    if constexpr (kCausal) end = min(end, block0 + last_row + 1);
    const uint32_t tiles = end > begin ? (end - begin + kTileKv - 1) / kTileKv : 0;

    // Table entries and the query on their way together, then the first tiles.
    Token tokens[kStages];
    QueryParts parts;
    if (tiles > 0) {
#pragma unroll
      for (uint32_t tile = 0; tile < kStages; ++tile) tokens[tile] = find_token(tile);
    }
    read_query(parts, row0);
#pragma unroll
    for (uint32_t tile = 0; tile + 1 < kStages; ++tile) {
      if (tile < tiles) copy_tile(tile, stage(tile), tokens[tile]);
      flashinfer::cp_async::commit_group();
    }
    Token next = tokens[kStages - 1];
    store_query(parts);
    __syncthreads();

    Rows scale;
    prepare(scale);
    uint32_t held[kQueryInRegisters ? kSteps : 1][4];
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (uint32_t step = 0; step < kSteps; ++step) {
        Fragments a;
        query_fragments(step, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) held[step][i] = a[0][i];
      }
    }
    // Rows of a tile that is not full are zeros: warps that have no others only copy.
    const bool works =
        kWarpsQ == 1 || tile_row0 + static_cast<int32_t>(warp_row0()) < qo_len * group_size;

    uint32_t reads = 0, writes = kStages - 1;  // stages
#pragma unroll 1
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      flashinfer::cp_async::wait_group<kStages - 2>();
      // After it, all of this tile is there, and nobody reads the one whose place the next copy takes.
      group_barrier();
      if (tile + kStages - 1 < tiles) copy_tile(tile + kStages - 1, stage(writes), next);
      flashinfer::cp_async::commit_group();
      next = find_token(tile + kStages);
      const int32_t first = tile_begin(tile);
      uint8_t* k = stage(reads);
      writes = reads;
      reads = reads + 1 == kStages ? 0 : reads + 1;
      if (works && first < end) {
        Logits s;
        score(k, held, s);
        if constexpr (kUseSoftCap) {
#pragma unroll
          for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
            for (uint32_t t = 0; t < kMmaKv; ++t) {
#pragma unroll
              for (int i = 0; i < 8; ++i) s[q][t][i] = capped(s[q][t][i], scale[q][i / 2 % 2]);
            }
          }
        }
        if (is_masked(first)) mask(first, s);
        Rows factor;
#pragma unroll
        for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
          for (uint32_t j = 0; j < 2; ++j) factor[q][j] = kUseSoftCap ? 1.f : scale[q][j];
        }
        attend(k + kTokens * kPitchKv, s, factor);
      }
    }
    flashinfer::cp_async::wait_group<0>();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDACC__)
    // The merge may start to be placed; it waits for the end of this kernel before it reads.
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if constexpr (kWarpsKv == 1) {
      write_one();
    } else {
      write();
    }
  }

  // Starting values, and the factors from products to base-2 logits (or, with soft cap, to the exponent
  // of the tanh).
  __device__ __forceinline__ void prepare(Rows& scale) {
    float factor = p.sm_scale * p.k_scale * static_cast<float>(1 << KvWords::kShift);
    if (p.k_scale_ptr != nullptr) factor *= __ldg(p.k_scale_ptr);
    factor *= kUseSoftCap ? 2.f * flashinfer::math::log2e / p.logits_soft_cap : flashinfer::math::log2e;
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        scale[q][j] = factor;
        if constexpr (kScaledQ) scale[q][j] *= row_numbers()[row_of(q, j)];
        m[q][j] = kLowest;
        d[q][j] = 0.f;
      }
#pragma unroll
      for (uint32_t step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 8; ++i) o[q][step][i] = 0.f;
      }
    }
  }

  // Where the request's rows are in the output: the first one, and from one to the next; partial outputs of one row
  // follow each other.
  struct OutputRows {
    int64_t first;
    int32_t step;
  };
  __device__ __forceinline__ OutputRows output_rows() const {
    const int64_t first = p.plan.o_indptr[request];
    if (!p.partition_kv) return {first, 1};
    int32_t length = max(block0 + qo_len, 1);
    if constexpr (kUseWindow) {
      if (p.window_left >= 0) length = min(length, p.window_left + static_cast<int32_t>(kRows));
    }
    const int32_t kv_chunk = p.plan.header->kv_chunk;
    return {first + kv_chunk_index, (length + kv_chunk - 1) / kv_chunk};
  }

  // The place of the tile's row `row` among the rows of all heads; false if the request has no such row.
  __device__ __forceinline__ bool find_row(const OutputRows& rows, uint32_t row, int64_t& at) const {
    uint32_t q, r;
    p.group_size.divmod(tile_row0 + row, q, r);
    at = (rows.first + static_cast<int64_t>(q) * rows.step) * p.num_qo_heads + head * p.group_size + r;
    return static_cast<int32_t>(q) < qo_len;
  }

  // top: what the weights are relative to; sum: of the weights.
  __device__ __forceinline__ void write_lse(const OutputRows& rows, uint32_t row, float top, float sum) const {
    int64_t at;
    if (p.lse != nullptr && find_row(rows, row, at)) {
      p.lse[at] = sum > 0.f ? flashinfer::math::ptx_log2(sum) + top : -INFINITY;
    }
  }

  __device__ __forceinline__ float scale_of_v() const {
    const float scale = p.v_scale * static_cast<float>(1 << KvWords::kShift);
    return p.v_scale_ptr != nullptr ? scale * __ldg(p.v_scale_ptr) : scale;
  }

  // The output of the only group. A warp's rows of the query are its own: the output takes their place on its way.
  __device__ __forceinline__ void write_one() {
    const OutputRows rows = output_rows();
    const float v_scale = scale_of_v();
    __syncwarp();
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t row = row_of(q, j);
        const float inverse = d[q][j] > 0.f ? v_scale / d[q][j] : 0.f;
#pragma unroll
        for (uint32_t step = 0; step < kSteps; ++step) {
          const float* x = o[q][step] + 2 * j;
          if constexpr (kFp8) {
            const uint2 y = make_uint2(pack_output(x[0] * inverse, x[4] * inverse),
                                       pack_output(x[1] * inverse, x[5] * inverse));
            *reinterpret_cast<uint2*>(query() + place<kPitchQ>(row, lane % 4 / 2, 2 * step) + 8 * (lane % 2)) = y;
          } else {
            const uint32_t low = pack_output(x[0] * inverse, x[1] * inverse);
            const uint32_t high = pack_output(x[4] * inverse, x[5] * inverse);
            *reinterpret_cast<uint32_t*>(query() + place<kPitchQ>(row, 0, 2 * step) + 4 * (lane % 4)) = low;
            *reinterpret_cast<uint32_t*>(query() + place<kPitchQ>(row, 1, 2 * step) + 4 * (lane % 4)) = high;
          }
        }
        if (lane % 4 == 0) write_lse(rows, row, m[q][j], d[q][j]);
      }
    }
    __syncwarp();
    DTypeQ* out = p.output();
    constexpr uint32_t kParts = kHeadDim / 8;
#pragma unroll 4
    for (uint32_t i = lane; i < kMmaQ * 16 * kParts; i += 32) {
      const uint32_t row = warp_row0() + i / kParts, part = i % kParts;
      int64_t at;
      if (!find_row(rows, row, at)) continue;
      *reinterpret_cast<uint4*>(out + at * kHeadDim + part * 8) =
          *reinterpret_cast<const uint4*>(query() + place<kPitchQ>(row, part));
    }
  }

  // Sums of all groups, through shared memory, to the output.
  __device__ __forceinline__ void write() {
    const OutputRows rows = output_rows();
    const float v_scale = scale_of_v();
    float* sums = reinterpret_cast<float*>(smem);
    float* tops = row_numbers();                    // [kWarpsKv][kRows]
    float* weights = tops + kWarpsKv * kRows;       // [kWarpsKv][kRows]: first the sums of weights
    __syncthreads();  // nobody needs the tiles, the query or its scales any more
#pragma unroll
    for (uint32_t q = 0; q < kMmaQ; ++q) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t row = row_of(q, j);
        float* to = sums + (group * kRows + row) * kSumPitch;
#pragma unroll
        for (uint32_t step = 0; step < kSteps; ++step) {
          const float* x = o[q][step] + 2 * j;
          if constexpr (kFp8) {
            *reinterpret_cast<float4*>(to + step * 16 + lane % 4 * 4) = make_float4(x[0], x[4], x[1], x[5]);
          } else {
            *reinterpret_cast<float2*>(to + step * 16 + lane % 4 * 2) = make_float2(x[0], x[1]);
            *reinterpret_cast<float2*>(to + step * 16 + 8 + lane % 4 * 2) = make_float2(x[4], x[5]);
          }
        }
        if (lane % 4 == 0) {
          tops[group * kRows + row] = m[q][j];
          weights[group * kRows + row] = d[q][j];
        }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t row = threadIdx.x; row < kRows; row += kThreads) {
      float top = kLowest, sum = 0.f, w[kWarpsKv];
#pragma unroll
      for (uint32_t g = 0; g < kWarpsKv; ++g) top = fmaxf(top, tops[g * kRows + row]);
#pragma unroll
      for (uint32_t g = 0; g < kWarpsKv; ++g) {
        w[g] = flashinfer::math::ptx_exp2(tops[g * kRows + row] - top);
        sum += w[g] * weights[g * kRows + row];
      }
      // A row that saw nothing: zeros, and weight zero in the merge.
      const float inverse = sum > 0.f ? v_scale / sum : 0.f;
#pragma unroll
      for (uint32_t g = 0; g < kWarpsKv; ++g) weights[g * kRows + row] = w[g] * inverse;
      write_lse(rows, row, top, sum);
    }
    __syncthreads();
    DTypeQ* out = p.output();
    constexpr uint32_t kParts = kHeadDim / 8;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kRows * kParts; i += kThreads) {
      const uint32_t row = i / kParts, part = i % kParts;
      int64_t at;
      if (!find_row(rows, row, at)) continue;
      float x[8] = {};
#pragma unroll
      for (uint32_t g = 0; g < kWarpsKv; ++g) {
        const float w = weights[g * kRows + row];
        const float4* from = reinterpret_cast<const float4*>(sums + (g * kRows + row) * kSumPitch + part * 8);
        const float4 a = from[0], b = from[1];
        x[0] += w * a.x, x[1] += w * a.y, x[2] += w * a.z, x[3] += w * a.w;
        x[4] += w * b.x, x[5] += w * b.y, x[6] += w * b.z, x[7] += w * b.w;
      }
      alignas(16) DTypeQ y[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) y[k] = static_cast<DTypeQ>(x[k]);
      *reinterpret_cast<uint4*>(out + at * kHeadDim + part * 8) = *reinterpret_cast<const uint4*>(y);
    }
  }
};

#if defined(__CUDACC__)  // the tests run StreamKernel on emulated threads
namespace detail {

template <MaskMode MODE, uint32_t TILE_Q>
__global__ __launch_bounds__(StreamLayout<TILE_Q>::kThreads) void stream_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  StreamKernel<MODE, TILE_Q>(params, smem).run();
}

// More than 48 KB of shared memory is an opt-in per function and device.
template <MaskMode MODE, uint32_t TILE_Q>
cudaError_t opt_in() {
  return cudaFuncSetAttribute(stream_kernel<MODE, TILE_Q>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(StreamLayout<TILE_Q>::kSmem));
}

template <MaskMode MODE, uint32_t TILE_Q>
cudaError_t launch(const Params& params, uint32_t grid, uint32_t num_kv_heads, cudaStream_t stream) {
  using L = StreamLayout<TILE_Q>;
  const cudaError_t status = opt_in<MODE, TILE_Q>();
  if (status != cudaSuccess) return status;
  // The heads of one plan entry follow each other: a padded grid's idle blocks come last, so that those with
  // work are placed first and evenly.
  stream_kernel<MODE, TILE_Q><<<grid * num_kv_heads, L::kThreads, L::kSmem, stream>>>(params);
  return cudaGetLastError();
}

template <MaskMode MODE, uint32_t TILE_Q>
cudaError_t info(KernelInfo* out) {
  using L = StreamLayout<TILE_Q>;
  cudaError_t status = opt_in<MODE, TILE_Q>();
  if (status != cudaSuccess) return status;
  cudaFuncAttributes attributes;
  status = cudaFuncGetAttributes(&attributes, stream_kernel<MODE, TILE_Q>);
  if (status != cudaSuccess) return status;
  int ctas = 0;
  status =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, stream_kernel<MODE, TILE_Q>, L::kThreads, L::kSmem);
  if (status != cudaSuccess) return status;
  out->tile_kv = L::kTileKv;
  out->smem_bytes = static_cast<int32_t>(L::kSmem);
  out->ctas_per_sm = ctas;
  out->registers = attributes.numRegs;
  out->local_bytes = static_cast<int32_t>(attributes.localSizeBytes);
  return cudaSuccess;
}

}  // namespace detail
#endif  // __CUDACC__

}  // namespace spec_mask

// Body of one unit; build.py writes a .cu with this line per (mode, tile).
#define SPEC_MASK_UNIT(MODE, TILE_Q)                                                                    \
  namespace spec_mask {                                                                                 \
  template <>                                                                                           \
  cudaError_t launch_attention<MaskMode::MODE, TILE_Q>(const Params& params, uint32_t grid,             \
                                                       uint32_t num_kv_heads, cudaStream_t stream) {    \
    return detail::launch<MaskMode::MODE, TILE_Q>(params, grid, num_kv_heads, stream);                  \
  }                                                                                                     \
  template <>                                                                                           \
  cudaError_t attention_info<MaskMode::MODE, TILE_Q>(KernelInfo * info) {                               \
    return detail::info<MaskMode::MODE, TILE_Q>(info);                                                  \
  }                                                                                                     \
  }
