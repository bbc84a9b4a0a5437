// What the tests add to the C interface of vllm_specpatch/selftest_planner.py, behind which this is compiled:
// the code the GPU runs on several threads, and one of its parts.
#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

#include "planner.cuh"

using namespace spec_mask;

namespace {

// Several threads in groups of `lanes`, with the collectives done through shared memory. Finds
// missing barriers and results that depend on the team's size.
struct ThreadTeam {
  struct Shared {
    explicit Shared(int32_t n) : threads(n), barrier(n), totals(n), pairs(n) {}
    int32_t threads;
    std::barrier<> barrier;
    std::vector<Totals> totals;
    std::vector<Pair> pairs;
  };
  Shared* shared;
  int32_t index, width, number, teams;

  int32_t rank() const { return index; }
  int32_t size() const { return shared->threads; }
  int32_t group() const { return index / width; }
  int32_t groups() const { return shared->threads / width; }
  int32_t lane() const { return index % width; }
  int32_t lanes() const { return width; }
  int32_t part() const { return number; }
  int32_t parts() const { return teams; }
  void sync() const { shared->barrier.arrive_and_wait(); }

  // A group's collective must not wait for other groups: groups run different numbers of them.
  // Width 1 keeps that true with a plain barrier type.
  int32_t from_lane(int32_t v, int32_t) const { return v; }
  int32_t group_sum(int32_t v) const { return v; }
  Choice group_min(const Choice& v) const { return v; }

  Totals reduce(const Totals& v) const {
    sync();
    shared->totals[index] = v;
    sync();
    Totals all;
    for (const Totals& x : shared->totals) all.add(x);
    return all;
  }
  Pair exclusive_scan(Pair v, Pair* total) const {
    sync();
    shared->pairs[index] = v;
    sync();
    Pair before{0, 0}, all{0, 0};
    for (int32_t i = 0; i < shared->threads; ++i) {
      const Pair x = shared->pairs[i];
      if (i < index) before = Pair{before.ctas + x.ctas, before.rows + x.rows};
      all = Pair{all.ctas + x.ctas, all.rows + x.rows};
    }
    *total = all;
    return before;
  }
};

}  // namespace

extern "C" {

int32_t chunks(int32_t covered_tokens, int32_t chunk) { return Chunks(chunk).in(static_cast<float>(covered_tokens)); }
int32_t max_kv_len() { return kMaxKvLen; }
int32_t covered(const PlanShape* shape, int32_t kv_len) { return covered_tokens(*shape, kv_len); }

void plan_on_threads(const PlanShape* shape, const int32_t* seq_lens, const int32_t* query_start_loc,
                     int32_t num_requests, int32_t* buffer, int32_t threads, int32_t teams) {
  const PlanArrays arrays = plan_arrays(*shape, buffer);
  for (int32_t number = teams - 1; number >= 0; --number) {  // in no order that a GPU would keep
    std::vector<int32_t> scratch(plan_scratch_elements(*shape), -1);
    ThreadTeam::Shared shared(threads);
    std::vector<std::thread> workers;
    for (int32_t t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        ThreadTeam team{&shared, t, 1, number, teams};
        make_plan(team, *shape, seq_lens, query_start_loc, num_requests, arrays, scratch.data());
      });
    }
    for (auto& worker : workers) worker.join();
  }
}
}
