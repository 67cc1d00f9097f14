// Just enough of CUDA to run a kernel on a CPU (cuda_on_cpu.py): a block's threads take turns, and every barrier and
// every exchange between lanes is a turn's end. At a barrier a thread waits for all others, and in an exchange for those
// of its warp, which take as many turns. A thread that misses one that the others come to is an error.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "../metal/short_numbers.hpp"

using std::max;
using std::min;
#define __shared__ static
using Shape = std::array<int32_t, 8>;
using Strides = std::array<int64_t, 8>;
struct Index { int x, y, z; };

static Index threadIdx, blockIdx, blockDim;

using float16 = emulator::Small<false>;
using bfloat16 = emulator::Small<true>;

struct Copy { void* to; const void* from; };
struct Thread {
  ucontext_t context;
  jmp_buf place;
  std::vector<char> stack;
  int turns;
  bool started, waits, done;
  std::vector<std::vector<Copy>> copies;  // in groups, of which the last one is still being asked for
};
static std::vector<Thread> threads;
static jmp_buf scheduler;
static std::vector<float> exchanged[2];

// A context only starts a thread: to change contexts asks the system for its signals each time, to jump does not.
static void take_turn(Thread& thread) {
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.context);
}

static void end_turn() {
  Thread& self = threads[threadIdx.x];
  self.turns++;
  if (!_setjmp(self.place)) _longjmp(scheduler, 1);
}

static void __syncthreads() {
  threads[threadIdx.x].waits = true;
  end_turn();
}

static float __shfl_xor_sync(unsigned, float value, int distance) {
  const int self = threadIdx.x;
  auto& values = exchanged[threads[self].turns % 2];
  values[self] = value;
  end_turn();
  return values[self ^ distance];
}

static bool __any_sync(unsigned, bool value) {
  const int self = threadIdx.x;
  auto& values = exchanged[threads[self].turns % 2];
  values[self] = value;
  end_turn();
  return std::any_of(&values[self / 32 * 32], &values[self / 32 * 32] + 32, [](float other) { return other != 0; });
}

// What kernels/matrix_units.cu has the GPU do.
static float power_of_two(float power) { return exp2f(power); }
// Of the factors of a product a lane holds rows lane / 4 and 8 more of `left`, column
// lane / 4 of `right`, and of both the places 2 * (lane % 4), the next one, and these two 8 further on.
struct Fragments { uint32_t left[4], right[2]; };
static std::vector<Fragments> fragments[2];
static float short_number(uint32_t word, int which, bool brain) {
  const uint16_t bits = word >> (16 * which);
  return brain ? emulator::from_bfloat(bits) : emulator::from_half(bits);
}
template <bool BRAIN>
static void multiply_accumulate(float (&sums)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  const int self = threadIdx.x, warp = self / 32 * 32, lane = self % 32;
  auto& given = fragments[threads[self].turns % 2];
  if (given.size() != threads.size()) given.resize(threads.size());
  std::memcpy(given[self].left, left, sizeof left);
  std::memcpy(given[self].right, right, sizeof right);
  end_turn();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      const Fragments& a = given[warp + lane / 4 * 4 + k % 8 / 2];
      const Fragments& b = given[warp + (2 * (lane % 4) + i % 2) * 4 + k % 8 / 2];
      sums[i] += short_number(a.left[i / 2 + 2 * (k / 8)], k % 2, BRAIN) * short_number(b.right[k / 8], k % 2, BRAIN);
    }
}

// A block's memory has a margin that nobody may write to, and begins with numbers that are none.
constexpr int MARGIN = 1024;
static std::vector<uint64_t> memory;
template <typename T>
static T* block_memory() { return reinterpret_cast<T*>(memory.data()); }

// A copy may be made at any time up to where it is waited for: blocks take turns to have it made at once and then.
static void copy_async(void* to, const void* from) {
  if (blockIdx.x % 2) std::memcpy(to, from, 16);
  else threads[threadIdx.x].copies.back().push_back({to, from});
}
static void copies_asked() { threads[threadIdx.x].copies.emplace_back(); }
template <int LEFT>
static void wait_for_copies() {
  auto& groups = threads[threadIdx.x].copies;
  for (size_t i = 0; i + 1 + LEFT < groups.size(); i++) {
    for (const Copy& copy : groups[i]) std::memcpy(copy.to, copy.from, 16);
    groups[i].clear();
  }
}

static std::function<void()> body;
static void start() {
  body();
  threads[threadIdx.x].done = true;
  _longjmp(scheduler, 1);
}

// Runs one block; what is wrong with it, or nullptr.
static const char* run_block(int count, int bytes) {
  threads = std::vector<Thread>(count);
  memory.assign((bytes + MARGIN) / 8, ~uint64_t(0));
  for (auto& values : exchanged) values.assign(count, 0);
  for (auto& thread : threads) {
    thread.stack.resize(64 * 1024);
    thread.copies.resize(1);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, start, 0);
  }
  const auto all = [](auto have) { return std::all_of(threads.begin(), threads.end(), have); };
  while (!all([](const Thread& thread) { return thread.done; })) {
    const bool together = all([](const Thread& thread) { return thread.waits; });
    bool moved = together;
    for (int turn = 0; turn < count; turn++) {
      // No order may be relied on: it is another one in every other block.
      const int i = blockIdx.x % 2 ? count - 1 - turn : turn;
      if (together) threads[i].waits = false;
      if (threads[i].done || threads[i].waits) continue;
      threadIdx.x = i;
      take_turn(threads[i]);
      moved = true;
    }
    if (!moved) return "threads came to different barriers";
  }
  for (int i = 0; i < count; i++)
    if (threads[i].turns != threads[i / 32 * 32].turns) return "threads of a warp came to different barriers";
  if (!std::all_of(memory.begin() + bytes / 8, memory.end(), [](uint64_t word) { return word == ~uint64_t(0); }))
    return "a block wrote beyond its memory";
  return nullptr;
}

static const char* run_blocks(const int (&blocks)[3], int threads_each, int memory_each) {
  blockDim = {threads_each, 1, 1};
  for (blockIdx.z = 0; blockIdx.z < blocks[2]; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < blocks[1]; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < blocks[0]; blockIdx.x++)
        if (const char* problem = run_block(threads_each, memory_each)) return problem;
  return nullptr;
}
