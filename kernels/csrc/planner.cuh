// The split-KV plan of one verify batch, as pure logic.
//
// FlashInfer plans its FA2 prefill kernels on the host: it reads every length, builds lists of
// (request, query tile, KV chunk) and copies them to the GPU. A CUDA graph replays whatever plan
// lies in those buffers, so a replay with other lengths needs a new host plan, a wait for the
// lengths and a copy. The functions below build the same lists from lengths that are already on
// the device, so planning is one small kernel on the stream and can itself be captured.
//
// Everything here is `__host__ __device__`, depends on nothing but the C library and compiles with
// g++: the tests run exactly this code on the CPU, with one thread and with several.
//
// Names follow FlashInfer's FA2 template (include/flashinfer/attention/prefill.cuh):
//   row       one query token of one request; a request has q_len rows
//   q tile    CTA_TILE_Q packed rows; packed row = row * group_size + query head within its group
//   chunk     kv_chunk_size consecutive KV tokens of one request
//   CTA       one (request, q tile, chunk); the grid is (padded number of CTAs) x (KV heads), see attention.cuh
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define SPEC_PLAN_FN __host__ __device__ inline
#else
#define SPEC_PLAN_FN inline
#endif

// Loops that most threads pass once. nvcc would unroll them by four, and of a kernel that runs once, on a
// multiprocessor that has run others since, much of the time goes into fetching its instructions.
#if defined(__CUDACC__)
#define SPEC_PLAN_ONCE _Pragma("unroll 1")
#else
#define SPEC_PLAN_ONCE
#endif

namespace spec_mask {

enum SplitMode : int32_t {
  kSplitAuto = 0,   // chunk size chosen from the lengths so that the captured grid is filled
  kSplitFixed = 1,  // chunk size given: results do not depend on the rest of the batch
  kSplitNone = 2,   // one chunk per request, no merge
};

// What the planner found wrong with the lengths, OR-ed into PlanHeader::status. The device cannot
// raise, so it plans something harmless instead and leaves a trace that Plan.check() reads.
enum PlanStatus : int32_t {
  kStatusOk = 0,
  kStatusBadQueryLen = 1,  // q_len < 0 or above the captured maximum: request treated as empty
  kStatusBadRows = 2,      // rows outside [0, max_rows): request treated as empty
  kStatusBadKvLen = 4,     // kv_len < 0 or above the captured maximum: clamped
};

// Chunk sizes that the auto mode compares: kPieces that cut the longest request into 1, 2, ...
// equal pieces, and as many that give every multiprocessor 1, 2, ... CTAs.
constexpr int32_t kPieces = 16;
constexpr int32_t kCandidates = 2 * kPieces;
// Up to so many requests, times groups of a team, a thread counts the CTAs of a candidate by itself.
constexpr int32_t kFewCounts = 128;
// Threads that write the rows of one request; a verify step has 1 + k of them.
constexpr int32_t kRowThreads = 8;

// The captured shape. Constant for the life of a plan, so a CUDA graph may bake it in.
struct PlanShape {
  int32_t max_requests;
  int32_t max_rows;       // upper bound of query_start_loc[num_requests]
  int32_t max_q_len;      // upper bound of one request's rows
  int32_t group_size;     // query heads per KV head
  int32_t num_kv_heads;
  int32_t tile_q;         // CTA_TILE_Q of the compiled kernel
  int32_t granule;        // chunk sizes are multiples of this
  int32_t min_chunk;      // smallest chunk the auto mode may choose; multiple of granule
  int32_t window_left;    // sliding window, -1 for none
  int32_t max_kv_len;     // longest request; bounds the page table reads
  int32_t page_table_stride;  // row stride of the page table, in entries
  int32_t split_mode;     // SplitMode
  int32_t fixed_chunk;    // chunk of kSplitFixed, in tokens; multiple of granule
  int32_t wave_ctas;      // CTAs per KV head that run at once (SMs * CTAs per SM / KV heads)
  int32_t num_sms;        // multiprocessors of the device
  // The cost model of the auto mode, see plan_cost. Times are in KV tokens that one
  // multiprocessor, fully occupied, works off.
  int32_t cta_tokens;     // fixed cost of a CTA: index loads, Q tile, first K tile, epilogue
  int32_t lone_percent;   // time per token of a CTA that cannot go faster, in percent
  int32_t merge_tokens;   // cost of one more chunk per row in the merge
  int32_t extra_waves;    // waves in the grid beyond those that the q tiles need
  int32_t grid;           // padded number of CTAs per KV head
};

// Of numbers that are not negative: a division of unsigned ones takes fewer instructions, and a sum above
// 2^31 - 1 is no overflow.
SPEC_PLAN_FN int32_t div_i32(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}
SPEC_PLAN_FN int32_t ceil_div_i32(int32_t a, int32_t b) {
  return static_cast<int32_t>((static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) /
                              static_cast<uint32_t>(b));
}
SPEC_PLAN_FN int64_t div_i64(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) / static_cast<uint64_t>(b));
}
SPEC_PLAN_FN int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
SPEC_PLAN_FN int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

SPEC_PLAN_FN int32_t q_tiles(const PlanShape& s, int32_t q_len) {
  return ceil_div_i32(q_len * s.group_size, s.tile_q);
}

// KV tokens that chunks must cover. This is the kernel's own expression for the row stride of the
// partial outputs, min(max(kv_len, 1), window_left + CTA_TILE_Q): if the two ever differed, the
// merge would read rows that nobody wrote. An empty request with rows counts one token, so that
// one CTA writes its zeros.
SPEC_PLAN_FN int32_t covered_tokens(const PlanShape& s, int32_t kv_len) {
  const int32_t length = max_i32(kv_len, 1);
  return s.window_left >= 0 && s.window_left < length ? min_i32(length, s.window_left + s.tile_q)
                                                      : length;
}

// Most q tiles any admissible batch can have: rows are bounded in total and per request.
SPEC_PLAN_FN int32_t max_q_tiles(const PlanShape& s) {
  const int32_t per_request = s.max_requests * q_tiles(s, s.max_q_len);
  const int32_t by_rows = ceil_div_i32(s.max_rows * s.group_size, s.tile_q) + s.max_requests - 1;
  return max_i32(1, min_i32(per_request, by_rows));
}

// Grid of a captured shape.
//   none   exactly the q tiles.
//   fixed  exactly the q tiles times the chunks of the longest request.
//   auto   one wave if the q tiles are few against it (a short batch then fills the GPU by
//          splitting, and not one CTA is launched in vain). Otherwise extra_waves more than the q
//          tiles need: without them a single long request in a large batch could not be split, and
//          20 requests on 33 slots would leave 13 idle. A CTA in vain exits on its first load.
SPEC_PLAN_FN int32_t plan_grid(const PlanShape& s) {
  const int32_t tiles = max_q_tiles(s);
  if (s.split_mode == kSplitNone) return tiles;
  if (s.split_mode == kSplitFixed) {
    return tiles * ceil_div_i32(covered_tokens(s, s.max_kv_len), s.fixed_chunk);
  }
  const int32_t wave = max_i32(1, s.wave_ctas);
  const int32_t most = tiles * ceil_div_i32(covered_tokens(s, s.max_kv_len), s.min_chunk);
  const int32_t waves = tiles * 4 <= wave ? 1 : ceil_div_i32(tiles, wave) + s.extra_waves;
  return max_i32(tiles, min_i32(most, waves * wave));
}

// Rows of partial outputs that a plan can need. A request with t tiles and c chunks takes t*c
// CTAs and q_len*c partial rows, and q_len * group_size <= t * tile_q.
SPEC_PLAN_FN int64_t max_partial_rows(const PlanShape& s) {
  if (s.split_mode == kSplitNone) return 0;
  return static_cast<int64_t>(s.grid) * s.tile_q / s.group_size;
}

// The kernels read kv_chunk and direct; the rest is for whoever looks at a plan from outside.
struct PlanHeader {
  int32_t kv_chunk;   // tokens per chunk
  int32_t num_ctas;   // valid CTAs per KV head
  int32_t num_rows;   // rows of all requests
  int32_t status;     // PlanStatus bits
  // No request is split: the attention kernel writes the output itself (o_indptr holds its rows)
  // and the merge has nothing to add.
  int32_t direct;
};

struct MergeRow {
  int32_t first;  // first partial row of this output row
  int32_t count;  // chunks; 0 for a row that belongs to no request and must not be written
};

// Offsets into the plan's int32 buffer, in int32 elements. Every array starts on 16 bytes.
struct PlanLayout {
  int64_t header;           // PlanHeader
  int64_t request_indices;  // [grid]
  int64_t qo_tile_indices;  // [grid]
  int64_t kv_tile_indices;  // [grid]
  int64_t o_indptr;         // [max_requests + 1]
  int64_t q_start;          // [max_requests] first row of each request
  int64_t q_len;            // [max_requests]
  int64_t kv_len;           // [max_requests]
  int64_t merge_rows;       // [max_rows] of MergeRow
  int64_t block_valid;      // [grid] bytes, bool for the kernel
  int64_t total;            // int32 elements
};

SPEC_PLAN_FN PlanLayout plan_layout(const PlanShape& s) {
  PlanLayout l;
  int64_t at = 0;
  const auto take = [&at](int64_t elements) {
    const int64_t here = at;
    at += (elements + 3) / 4 * 4;
    return here;
  };
  l.header = take(sizeof(PlanHeader) / sizeof(int32_t));
  l.request_indices = take(s.grid);
  l.qo_tile_indices = take(s.grid);
  l.kv_tile_indices = take(s.grid);
  l.o_indptr = take(s.max_requests + 1);
  l.q_start = take(s.max_requests);
  l.q_len = take(s.max_requests);
  l.kv_len = take(s.max_requests);
  l.merge_rows = take(2 * static_cast<int64_t>(s.max_rows));
  l.block_valid = take((s.grid + 3) / 4);
  l.total = at;
  return l;
}

struct PlanArrays {
  PlanHeader* header;
  int32_t* request_indices;
  int32_t* qo_tile_indices;
  int32_t* kv_tile_indices;
  int32_t* o_indptr;
  int32_t* q_start;
  int32_t* q_len;
  int32_t* kv_len;
  MergeRow* merge_rows;
  bool* block_valid;
};

SPEC_PLAN_FN PlanArrays plan_arrays(const PlanShape& s, int32_t* base) {
  const PlanLayout l = plan_layout(s);
  PlanArrays a;
  a.header = reinterpret_cast<PlanHeader*>(base + l.header);
  a.request_indices = base + l.request_indices;
  a.qo_tile_indices = base + l.qo_tile_indices;
  a.kv_tile_indices = base + l.kv_tile_indices;
  a.o_indptr = base + l.o_indptr;
  a.q_start = base + l.q_start;
  a.q_len = base + l.q_len;
  a.kv_len = base + l.kv_len;
  a.merge_rows = reinterpret_cast<MergeRow*>(base + l.merge_rows);
  a.block_valid = reinterpret_cast<bool*>(base + l.block_valid);
  return a;
}

// Scratch of one planning team: shared memory on the device. int32 elements.
SPEC_PLAN_FN int32_t plan_scratch_elements(const PlanShape& s) {
  return kCandidates + 5 * s.max_requests;
}

// What the planner knows about a batch as a whole.
struct Totals {
  int64_t tokens = 0;    // covered tokens times q tiles
  int32_t tiles = 0;     // q tiles
  int32_t longest = 0;   // covered tokens of the longest request with rows
  int32_t rows = 0;      // end of the last request's rows
  int32_t status = 0;    // PlanStatus bits

  SPEC_PLAN_FN void add(const Totals& t) {
    tokens += t.tokens;
    tiles += t.tiles;
    longest = max_i32(longest, t.longest);
    rows = max_i32(rows, t.rows);
    status |= t.status;
  }
};

struct Pair {
  int32_t ctas, rows;
};

// A chunk size that was weighed. Keys are different: the cost, and behind it the candidate's number,
// so that of two that cost the same the first is taken whoever compares them.
struct Choice {
  uint64_t key;
  int32_t chunk;
};

// ---------------------------------------------------------------------------------------------
// The planner. A Team is a set of threads that call every function together:
//   rank(), size()                 this thread among all
//   group(), groups()              this thread's group; a group is a set of lanes (a warp)
//   lane(), lanes()                this thread within its group
//   sync()                         barrier that also orders memory
//   from_lane(v, lane)             v of another lane of the group
//   group_sum(v)                   sum over the lanes of a group, known to all its lanes
//   group_min(choice)              the smallest over the lanes of a group, known to all its lanes
//   reduce(totals)                 Totals::add over the team, known to all
//   exclusive_scan(pair, &total)   field by field, over ranks
//   part(), parts()                this team among those that plan the same batch side by side
// The two before the last are barriers too; the first of them is called once.
// With one thread, all of it is the identity; the result must not depend on the team's size. Teams know
// nothing of each other: each decides all of the plan and writes a part of it.
// ---------------------------------------------------------------------------------------------

SPEC_PLAN_FN int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof(x));
  return bits;
}
SPEC_PLAN_FN float from_bits(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// How many chunks of one size cover a number of tokens, for many of those. A division takes three times as many
// instructions, and of those and of conversions between int and float a multiprocessor does a quarter as many at a
// time. Exact up to kMaxKvLen tokens: the estimate is a whole number next to the quotient, and what remains, exact
// in fp32, says on which side.
constexpr int32_t kMaxKvLen = (1 << 24) - 1;

struct Chunks {
  float size, inverse;

  SPEC_PLAN_FN explicit Chunks(int32_t chunk)
      : size(static_cast<float>(chunk)), inverse(1.f / static_cast<float>(chunk)) {}

  SPEC_PLAN_FN int32_t in(float tokens) const {
    constexpr float kWhole = 8388608.f;  // 2^23: a sum with it is whole, and its lowest bits are that number
    const float shifted = tokens * inverse + kWhole;
    const float remainder = tokens - (shifted - kWhole) * size;
    return bits_of(shifted) - 0x4b000000 + (remainder > 0.f ? 1 : 0);
  }
};

// CTAs per KV head when chunks have `chunk` tokens, and when they have `other`. covered: bits of floats.
template <class Team>
SPEC_PLAN_FN void count_ctas(Team& team, int32_t num_requests, const int32_t* tiles,
                             const int32_t* covered, int32_t chunk, int32_t other, int32_t (&n)[2]) {
  const Chunks chunks(chunk), others(other);
  n[0] = n[1] = 0;
  for (int32_t i = team.lane(); i < num_requests; i += team.lanes()) {
    const float tokens = from_bits(covered[i]);
    n[0] += tiles[i] * chunks.in(tokens);
    n[1] += tiles[i] * others.in(tokens);
  }
  n[0] = team.group_sum(n[0]);
  n[1] = team.group_sum(n[1]);
}

// Chunk size of candidate k, a multiple of granule and at least min_chunk: the longest request in
// equal pieces (a short last piece would only leave its slot idle), or equal work for every CTA.
SPEC_PLAN_FN int32_t candidate_chunk(const PlanShape& s, const Totals& all, int32_t k) {
  int64_t tokens = ceil_div_i32(all.longest, k + 1);
  if (k >= kPieces) {
    const int32_t ctas = (k - kPieces + 1) * s.num_sms;
    const int64_t work = all.tokens * s.num_kv_heads + ctas - 1;
    // A division of 64 bits is a subroutine on a GPU.
    tokens = work <= UINT32_MAX ? static_cast<uint32_t>(work) / static_cast<uint32_t>(ctas) : div_i64(work, ctas);
    if (tokens > all.longest) tokens = all.longest;
  }
  const int32_t granules = ceil_div_i32(static_cast<int32_t>(tokens), s.granule);
  return max_i32(s.min_chunk, granules * s.granule);
}

// Estimated time of a chunk size, in KV tokens of one multiprocessor.
//   A wave of CTAs lasts as long as a multiprocessor needs for the tokens of all that it has, at one rate however
//   many run at once, but no less than a CTA needs alone, which cannot use the whole rate.
//   The last wave has fewer CTAs, so that its multiprocessors have fewer each, and it lasts as long as the longest
//   chunk. Those before it are as long as the mean one.
//   The merge costs about a CTA, and reads every chunk of a row one after the other.
// The constants were fitted to times measured on an H200 (tests/kernels/split_times.json).
SPEC_PLAN_FN int64_t plan_cost(const PlanShape& s, const Totals& all, int32_t chunk,
                               int32_t ctas) {
  // A CTA works in whole KV tiles; min_chunk is one, or two where they are small.
  const auto whole = [&](int32_t tokens) { return ceil_div_i32(tokens, s.min_chunk) * s.min_chunk; };
  const int32_t largest = whole(min_i32(chunk, all.longest));
  const int64_t tokens = all.tokens;
  const int32_t mean = whole(tokens < INT32_MAX ? ceil_div_i32(static_cast<int32_t>(tokens), ctas)
                                                : static_cast<int32_t>(div_i64(tokens + ctas - 1, ctas)));
  const int32_t wave = max_i32(1, s.wave_ctas);
  const int32_t full = div_i32(ctas - 1, wave), last = ctas - full * wave;
  // A grid times the KV heads is a number of CTAs that can be launched, so it has 31 bits.
  const auto lasts = [&](int32_t count, int32_t longest) {
    const int64_t each = static_cast<int64_t>(mean) + s.cta_tokens;
    const int64_t shared = ceil_div_i32(count * s.num_kv_heads, s.num_sms) * each;
    const int64_t alone = div_i64((static_cast<int64_t>(longest) + s.cta_tokens) * s.lone_percent, 100);
    return shared > alone ? shared : alone;
  };
  const int64_t pieces = ceil_div_i32(all.longest, chunk);
  const int64_t merge = pieces > 1 ? s.cta_tokens + pieces * s.merge_tokens : 0;
  return full * lasts(wave, mean) + lasts(last, largest) + merge;
}

// What candidate k costs if its chunks make `ctas` CTAs per KV head.
SPEC_PLAN_FN Choice weigh(const PlanShape& s, const Totals& all, int32_t k, int32_t chunk,
                          int32_t ctas) {
  static_assert(kCandidates <= 32, "the candidate's number has 5 bits of the key");
  constexpr uint64_t kNever = UINT64_MAX / 64;
  const uint64_t cost =
      ctas <= s.grid ? static_cast<uint64_t>(plan_cost(s, all, chunk, ctas)) : kNever;
  return Choice{cost * 32 + static_cast<uint64_t>(k), chunk};
}

SPEC_PLAN_FN Choice cheaper(const Choice& a, const Choice& b) { return b.key < a.key ? b : a; }

// Chooses the chunk size of one batch: the cheapest candidate that fits the captured grid. One
// that does not split at all always fits. A candidate is weighed by a lane of its own, since the
// divisions are what it takes. In a small batch every group counts and weighs all of them for itself, which is sooner
// than waiting to be told. In a large one a whole group counts the CTAs of a candidate, and since all have to wait
// for that, the first one weighs for all: sixteen groups would be in each other's way.
template <class Team>
SPEC_PLAN_FN int32_t choose_chunk(Team& team, const PlanShape& s, const Totals& all,
                                  int32_t num_requests, const int32_t* tiles,
                                  const int32_t* covered, int32_t* counts) {
  if (s.split_mode == kSplitNone) return max_i32(s.granule, all.longest);
  if (s.split_mode == kSplitFixed) return s.fixed_chunk;
  if (all.tiles == 0) return s.min_chunk;
  const bool few = num_requests * team.groups() <= kFewCounts;  // both are at most some thousands
  Choice best{UINT64_MAX, 0};
  SPEC_PLAN_ONCE
  for (int32_t k = team.lane(); k < kCandidates; k += team.lanes()) {
    const int32_t chunk = candidate_chunk(s, all, k);
    int32_t n = 0;
    if (few) {
      const Chunks chunks(chunk);
      for (int32_t i = 0; i < num_requests; ++i) n += tiles[i] * chunks.in(from_bits(covered[i]));
    } else {
      const int32_t first = k - team.lane();  // candidate of lane 0
      SPEC_PLAN_ONCE
      for (int32_t one = 2 * team.group(); one < team.lanes(); one += 2 * team.groups()) {
        const int32_t other = min_i32(one + 1, team.lanes() - 1);
        int32_t ctas[2];
        count_ctas(team, num_requests, tiles, covered, team.from_lane(chunk, one), team.from_lane(chunk, other), ctas);
        if (team.lane() == 0) {
          counts[first + one] = ctas[0];
          counts[first + other] = ctas[1];
        }
      }
      team.sync();
      if (team.group() != 0) continue;
      n = counts[k];
    }
    best = cheaper(best, weigh(s, all, k, chunk, n));
  }
  if (few) return team.group_min(best).chunk;
  if (team.group() == 0) {
    best = team.group_min(best);
    if (team.lane() == 0) counts[0] = best.chunk;
  }
  team.sync();
  return counts[0];
}

// The last i with values[i] <= value; values rise and values[0] <= value. Requests with nothing share
// their value with the one behind them, so this is never one of those. Quarters, not halves: three loads take as long
// as one, and there are half as many after each other.
SPEC_PLAN_FN int32_t last_at_most(const int32_t* values, int32_t count, int32_t value) {
  int32_t low = 0;
  for (int32_t step = (count + 3) / 4;; step = (step + 3) / 4) {
    const int32_t from = low;
    for (int32_t quarter = 1; quarter < 4; ++quarter) {
      const int32_t i = from + quarter * step;
      if (i < count && values[i] <= value) low = i;
    }
    if (step <= 1) return low;
  }
}

// Plans one batch.
//   seq_lens         [num_requests] KV tokens of each request, its query tokens included
//   query_start_loc  [num_requests + 1] first row of each request; non-decreasing
//   scratch          plan_scratch_elements(s) int32, shared by the team
// num_requests <= max_requests. Writes every array of `out`; depends on nothing else.
template <class Team>
SPEC_PLAN_FN void make_plan(Team& team, const PlanShape& s, const int32_t* seq_lens,
                            const int32_t* query_start_loc, int32_t num_requests,
                            const PlanArrays& out, int32_t* scratch) {
  int32_t* counts = scratch;
  int32_t* tiles = counts + kCandidates;
  int32_t* covered = tiles + s.max_requests;
  int32_t* q_len_of = covered + s.max_requests;
  int32_t* q_start_of = q_len_of + s.max_requests;
  int32_t* first_row_of = q_start_of + s.max_requests;
  // covered holds the bits of floats. Nobody needs the first two any more when these are written: a scan, with its
  // barriers, lies between.
  int32_t* chunks_of = tiles;
  int32_t* first_cta_of = covered;
  const bool first_team = team.part() == 0;
  // This thread among those of all teams.
  const int32_t rank = team.part() * team.size() + team.rank(), size = team.parts() * team.size();

  // Lengths are copied, so that the attention kernels of this step see the same numbers as the
  // planner even if the caller's buffers already hold the next step's.
  Totals mine;
SPEC_PLAN_ONCE
  for (int32_t i = team.rank(); i < s.max_requests; i += team.size()) {
    int32_t begin = 0, q_len = 0, kv_len = 0;
    if (i < num_requests) {
      begin = query_start_loc[i];
      q_len = query_start_loc[i + 1] - begin;
      kv_len = seq_lens[i];
      if (q_len < 0 || q_len > s.max_q_len) {
        mine.status |= kStatusBadQueryLen;
        q_len = 0;
      }
      if (begin < 0 || begin > s.max_rows - q_len) {
        mine.status |= kStatusBadRows;
        begin = 0;
        q_len = 0;
      }
      // A padded request (no rows) may carry any length; it is never read.
      if (q_len > 0 && (kv_len < 0 || kv_len > s.max_kv_len)) {
        mine.status |= kStatusBadKvLen;
      }
      kv_len = min_i32(max_i32(kv_len, 0), s.max_kv_len);
    }
    const int32_t my_tiles = q_len > 0 ? q_tiles(s, q_len) : 0;
    const int32_t my_covered = covered_tokens(s, kv_len);
    if (first_team) {
      out.q_start[i] = begin;
      out.q_len[i] = q_len;
      out.kv_len[i] = kv_len;
    }
    q_start_of[i] = begin;
    q_len_of[i] = q_len;
    tiles[i] = my_tiles;
    covered[i] = bits_of(static_cast<float>(my_covered));
    if (my_tiles > 0) {
      mine.tiles += my_tiles;
      mine.tokens += static_cast<int64_t>(my_tiles) * my_covered;
      mine.longest = max_i32(mine.longest, my_covered);
      mine.rows = max_i32(mine.rows, begin + q_len);
    }
  }
  const Totals all = team.reduce(mine);  // orders the scratch writes too
  // Rows of max_q_len-sized requests may still exceed the captured total when query_start_loc
  // overlaps; the CTA bound below then drops the excess instead of writing past the arrays.
  const int32_t chunk = choose_chunk(team, s, all, num_requests, tiles, covered, counts);
  const bool direct = s.split_mode == kSplitNone || chunk >= all.longest;

  // Rows that belong to no request. In a valid plan those are the rows after the last request. In another, any:
  // all are cleared first, and one team does that and the rest, since teams cannot wait for each other.
  const bool valid = all.status == kStatusOk;
  const int32_t row_rank = valid ? rank : team.rank(), row_size = valid ? size : team.size();
  const bool writes_rows = valid || first_team;
SPEC_PLAN_ONCE
  for (int32_t r = row_rank + (valid ? all.rows : 0); writes_rows && r < s.max_rows; r += row_size) {
    out.merge_rows[r] = MergeRow{0, 0};
  }
  // In a valid plan offsets rise: the only other rows of nobody are those before the first offset.
SPEC_PLAN_ONCE
  for (int32_t r = row_rank; writes_rows && r < q_start_of[0]; r += row_size) {
    out.merge_rows[r] = MergeRow{0, 0};
  }
  if (!valid) team.sync();

  const Chunks cut(chunk);
  Pair base{0, 0};
  const int32_t rounds = ceil_div_i32(s.max_requests, team.size());
SPEC_PLAN_ONCE
  for (int32_t round = 0; round < rounds; ++round) {
    const int32_t i = round * team.size() + team.rank();
    Pair my{0, 0};
    int32_t chunks = 0;
    if (i < s.max_requests && tiles[i] > 0) {
      chunks = direct ? 1 : cut.in(from_bits(covered[i]));
      my.ctas = tiles[i] * chunks;
      my.rows = q_len_of[i] * chunks;
    }
    Pair total;
    const Pair before = team.exclusive_scan(my, &total);
    if (i < s.max_requests) {
      // Without partial outputs the kernel writes straight to row o_indptr[i] of the output.
      const int32_t first_row = base.rows + before.rows;
      if (first_team) out.o_indptr[i] = direct ? q_start_of[i] : first_row;
      first_row_of[i] = first_row;
      first_cta_of[i] = base.ctas + before.ctas;
      chunks_of[i] = chunks;
    }
    base.ctas += total.ctas;
    base.rows += total.rows;
  }
  team.sync();
  // More than the grid holds only if offsets overlap. Requests from the first that does not fit whole on are then
  // left out: part of one would write partial rows beyond those that there are.
  const int32_t num_ctas =
      base.ctas <= s.grid ? base.ctas : first_cta_of[last_at_most(first_cta_of, num_requests, s.grid)];
  if (rank == 0) {
    out.o_indptr[s.max_requests] = direct ? all.rows : base.rows;
    out.header->kv_chunk = chunk;
    out.header->num_ctas = num_ctas;
    out.header->num_rows = all.rows;
    out.header->status = base.ctas > s.grid ? all.status | kStatusBadRows : all.status;
    out.header->direct = direct ? 1 : 0;
  }

  // A thread per CTA, not a warp per request: of 256 requests a block of 16 warps would take 16 turns
  // with most lanes idle, and a turn is half a microsecond of latency (measured on an H200).
SPEC_PLAN_ONCE
  for (int32_t b = rank; b < s.grid; b += size) {
    const bool used = b < num_ctas;
    out.block_valid[b] = used;
    if (!used) continue;
    const int32_t i = last_at_most(first_cta_of, num_requests, b);
    const int32_t e = b - first_cta_of[i], chunks = chunks_of[i], tile = div_i32(e, chunks);
    out.request_indices[b] = i;
    out.qo_tile_indices[b] = tile;
    out.kv_tile_indices[b] = e - tile * chunks;
  }
  // Rows: some threads per request, about as many as it has rows.
  const int32_t width = team.size() % kRowThreads == 0 ? kRowThreads : 1;
SPEC_PLAN_ONCE
  for (int32_t i = row_rank / width; writes_rows && i < num_requests; i += row_size / width) {
    const int32_t q_len = q_len_of[i], begin = q_start_of[i], first_row = first_row_of[i];
    const int32_t next_cta = i + 1 < s.max_requests ? first_cta_of[i + 1] : base.ctas;
    const int32_t chunks = next_cta <= s.grid ? chunks_of[i] : 0;
SPEC_PLAN_ONCE
    for (int32_t r = row_rank % width; r < q_len; r += width) {
      out.merge_rows[begin + r] =
          chunks > 0 ? MergeRow{first_row + r * chunks, chunks} : MergeRow{0, 0};
    }
  }
}

// One thread doing all of it: the host's team.
struct SerialTeam {
  SPEC_PLAN_FN int32_t rank() const { return 0; }
  SPEC_PLAN_FN int32_t size() const { return 1; }
  SPEC_PLAN_FN int32_t group() const { return 0; }
  SPEC_PLAN_FN int32_t groups() const { return 1; }
  SPEC_PLAN_FN int32_t lane() const { return 0; }
  SPEC_PLAN_FN int32_t lanes() const { return 1; }
  SPEC_PLAN_FN void sync() const {}
  SPEC_PLAN_FN int32_t from_lane(int32_t v, int32_t) const { return v; }
  SPEC_PLAN_FN int32_t group_sum(int32_t v) const { return v; }
  SPEC_PLAN_FN Choice group_min(const Choice& v) const { return v; }
  SPEC_PLAN_FN Totals reduce(const Totals& v) const { return v; }
  SPEC_PLAN_FN Pair exclusive_scan(Pair v, Pair* total) const {
    *total = v;
    return Pair{0, 0};
  }
  SPEC_PLAN_FN int32_t part() const { return 0; }
  SPEC_PLAN_FN int32_t parts() const { return 1; }
};

}  // namespace spec_mask
