// Runs a compiled kernel: the threads of a threadgroup take turns on one processor, in an order that a test chooses.
//
// A turn ends where a thread has to wait for others: at a barrier, or where the lanes of a simdgroup exchange values.
// Nothing else orders them, so a barrier that is missing shows. A kernel that was compiled for checking also calls
// `touch` before each access to memory, which knows for each byte who wrote and read it last, and when.
#include "runtime.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace emulator {

Thread* current;
uint64_t matrix_operations;

struct Buffer {  // as emulator.py fills it in
  void* data;
  uint64_t bytes;
  const char* name;
  int32_t is_output;
  uint64_t bytes_read, bytes_written;  // by all threads together
  uint64_t bytes_fetched;  // bytes that a threadgroup read at least once, of all threadgroups together
};
struct Launch {
  uint32_t grid[3], threadgroup[3];
  int32_t order;  // 0 first threads first, 1 last threads first, 2 random
  uint32_t seed;
  int32_t checked;
  uint64_t matrix_operations, threadgroup_barriers, threadgroup_bytes;  // counted
};
using Kernel = void (*)(void** arguments);

// ---- memory: device buffers and a threadgroup's variables, with room between them

constexpr size_t APART = 1 << 16, THREADGROUP_MEMORY = 32768;
enum Space { DEVICE, THREADGROUP };

// Who touched a byte last, and at which time. Threads are numbered from 1, over all threadgroups.
struct Byte {
  uint32_t writer, reader, written_at, read_at, fetched_by;
  bool filled, several_readers;
};
struct Region {
  char* start;
  size_t bytes;
  const char* name;
  Space space;
  Buffer* buffer;  // none of threadgroup variables
  std::vector<Byte> shadow;
};
static std::vector<char> memory;
static std::vector<Region> regions;
static size_t first_variable, variables_start, variables_end;

// ---- threads

enum State { READY, EXCHANGING, AT_SIMDGROUP_BARRIER, AT_BARRIER, ENDED };
struct Fiber {
  Thread self;
  State state;
  int operation, line, memory;
  bool started;
  ucontext_t context;
  jmp_buf place;
};
struct Simdgroup {
  Exchange exchanges[2];  // lanes may still read the last one while others give for the next
  int turn;
  uint32_t time[2];  // of each memory: barriers so far
};
static std::vector<Fiber> fibers;
static std::vector<std::vector<char>> stacks;
static std::vector<Simdgroup> simdgroups;
static std::vector<int> ready;
static int self;
static uint32_t threadgroup_time[2], first_thread;
static jmp_buf scheduler, failed;
static Launch* launch;
static Kernel kernel;
static std::vector<void*> arguments;
static std::mt19937 randomness;
static std::string report;
static std::set<std::pair<uintptr_t, const char*>> reported;

static void say(const char* format, ...) {
  char text[500];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  report += text;
  report += "\n";
}

static std::string name_of(const Thread& t) {
  char text[100];
  snprintf(text, sizeof text, "thread (%u, %u, %u) of threadgroup (%u, %u, %u)", t.in_threadgroup[0],
           t.in_threadgroup[1], t.in_threadgroup[2], t.place[0], t.place[1], t.place[2]);
  return text;
}

void fail(int line, const char* what) {
  say("line %d: %s, by %s", line, what, name_of(*current).c_str());
  _longjmp(failed, 1);
}

static void run_thread() {
  kernel(arguments.data());
  fibers[self].state = ENDED;
  _longjmp(scheduler, 1);
}

static void release(int first, int end) {
  for (int i = first; i < end; i++) {
    fibers[i].state = READY;
    ready.push_back(i);
  }
}

static int next_thread() {
  size_t at = ready.size() - 1;
  if (launch->order == 2) at = randomness() % ready.size();
  for (size_t i = 0; launch->order != 2 && i < ready.size(); i++)
    if (launch->order == 0 ? ready[i] < ready[at] : ready[i] > ready[at]) at = i;
  const int chosen = ready[at];
  ready[at] = ready.back();
  ready.pop_back();
  return chosen;
}

// A context only starts a thread: to change contexts asks the system for its signals each time, to jump does not.
static void give_turn(int i) {
  self = i;
  Fiber& fiber = fibers[i];
  current = &fiber.self;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// Ends the turn. Once all threads that take part have come to the same place, they can go on.
static void wait(State state, int operation, int line, int memory) {
  Fiber& me = fibers[self];
  me.state = state, me.operation = operation, me.line = line, me.memory = memory;
  const bool everyone = state == AT_BARRIER;
  const int first = everyone ? 0 : self / 32 * 32, count = fibers.size(), end = everyone ? count : std::min(first + 32, count);
  const bool all = std::all_of(fibers.begin() + first, fibers.begin() + end, [&](const Fiber& other) {
    return other.state == state && other.operation == operation && other.line == line;
  });
  if (all) {
    Simdgroup& group = simdgroups[me.self.simdgroup];
    if (state == EXCHANGING) group.turn ^= 1;
    for (int space : {DEVICE, THREADGROUP})
      if (memory >> space & 1) (everyone ? threadgroup_time : group.time)[space]++;
    launch->threadgroup_barriers += everyone;
    release(first, end);
  }
  if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

const Exchange& exchange(int operation, int line, const void* value, size_t bytes) {
  Simdgroup& group = simdgroups[current->simdgroup];
  Exchange& now = group.exchanges[group.turn];
  memcpy(now.given[current->lane], value, bytes);
  wait(EXCHANGING, operation, line, 0);
  return now;
}
void wait_for_threadgroup(int memory, int line) { wait(AT_BARRIER, 0, line, memory); }
void wait_for_simdgroup(int memory, int line) { wait(AT_SIMDGROUP_BARRIER, 0, line, memory); }

static void explain_standstill() {
  const char* words[] = {"can run", "exchange values", "wait at a simdgroup barrier", "wait at a threadgroup barrier",
                         "have ended"};
  say("the threads went different ways, and none can go on:");
  std::set<std::pair<int, int>> told;
  for (const Fiber& fiber : fibers) {
    const int line = fiber.state == ENDED ? 0 : fiber.line;
    if (!told.insert({fiber.state, line}).second) continue;
    int count = 0;
    for (const Fiber& other : fibers) count += other.state == fiber.state && (!line || other.line == line);
    if (line) say("  %d threads %s, line %d", count, words[fiber.state], line);
    else say("  %d threads %s", count, words[fiber.state]);
  }
}

void* threadgroup_variable(const char* name, size_t bytes) {
  for (size_t i = first_variable; i < regions.size(); i++)
    if (!strcmp(regions[i].name, name)) return regions[i].start;
  size_t sum = bytes;
  for (size_t i = first_variable; i < regions.size(); i++) sum += regions[i].bytes;
  launch->threadgroup_bytes = std::max<uint64_t>(launch->threadgroup_bytes, sum);
  if (sum > THREADGROUP_MEMORY) fail(0, "more than 32768 bytes of threadgroup memory");
  char* start = memory.data() + variables_end;
  variables_end += (bytes + 63) / 64 * 64 + 256;
  memset(start, 0xff, bytes);
  regions.push_back({start, bytes, name, THREADGROUP, nullptr, std::vector<Byte>(launch->checked ? bytes : 0)});
  return start;
}

// ---- checks

static void complain(const char* what, const Region* region, uintptr_t address, int bytes, uintptr_t from) {
  if (!reported.insert({from, what}).second) return;
  // The nearest one, if it is in none.
  for (auto& other : regions)
    if (!region && address + APART > uintptr_t(other.start) && address < uintptr_t(other.start) + other.bytes + APART / 2)
      region = &other;
  const long offset = region ? long(address - uintptr_t(region->start)) : 0;
  say("%s: %d bytes at byte %ld of %zu of %s, by %s [%#lx]", what, bytes, offset, region ? region->bytes : 0,
      region ? region->name : "no variable", name_of(*current).c_str(), long(from));
}

static bool is_ordered(uint32_t other, uint32_t at, Space space) {
  if (!other || other == first_thread + current->index + 1) return true;
  const uint32_t index = other - first_thread - 1;
  if (index >= fibers.size()) return space == THREADGROUP;  // of another threadgroup
  if (at >> 16 != threadgroup_time[space]) return true;
  return fibers[index].self.simdgroup == current->simdgroup && (at & 0xffff) != simdgroups[current->simdgroup].time[space];
}

static void touch(const void* pointer, int bytes, bool writes, uintptr_t from) {
  const uintptr_t address = uintptr_t(pointer);
  if (address - uintptr_t(memory.data()) >= memory.size()) return;  // a thread's own
  Region* region = nullptr;
  for (auto& other : regions)
    if (address >= uintptr_t(other.start) && address + bytes <= uintptr_t(other.start) + other.bytes) region = &other;
  if (!region) {
    complain(writes ? "write out of bounds" : "read out of bounds", nullptr, address, bytes, from);
    _longjmp(failed, 1);
  }
  if (writes && region->buffer && !region->buffer->is_output) complain("write to an input", region, address, bytes, from);
  const Space space = region->space;
  const uint32_t me = first_thread + current->index + 1;
  const uint32_t now = threadgroup_time[space] << 16 | simdgroups[current->simdgroup].time[space];
  Byte* shadow = &region->shadow[address - uintptr_t(region->start)];
  if (region->buffer) (writes ? region->buffer->bytes_written : region->buffer->bytes_read) += bytes;
  bool empty = false, race = false;
  for (Byte* byte = shadow; byte < shadow + bytes; byte++) {
    race |= !is_ordered(byte->writer, byte->written_at, space);
    if (writes) {
      race |= !is_ordered(byte->reader, byte->read_at, space) || (byte->several_readers && byte->read_at == now);
      byte->writer = me, byte->written_at = now, byte->filled = true;
    } else {
      empty |= !byte->filled;
      byte->several_readers = byte->reader != me && !is_ordered(byte->reader, byte->read_at, space) ? true
          : byte->several_readers && byte->read_at == now;
      byte->reader = me, byte->read_at = now;
      if (region->buffer && byte->fetched_by != first_thread + 1)
        byte->fetched_by = first_thread + 1, region->buffer->bytes_fetched++;
    }
  }
  if (empty) complain("read before anything was written", region, address, bytes, from);
  if (race) complain("race", region, address, bytes, from);
}

// ---- launching

static void run_threadgroup(const uint32_t (&position)[3], const uint32_t (&size)[3], uint32_t number) {
  const int count = size[0] * size[1] * size[2];
  fibers = std::vector<Fiber>(count);
  simdgroups.assign((count + 31) / 32, Simdgroup{});
  if (stacks.size() < size_t(count)) stacks.resize(count, std::vector<char>(128 * 1024));
  regions.erase(regions.begin() + first_variable, regions.end());
  variables_end = variables_start;
  first_thread = number * count;
  threadgroup_time[0] = threadgroup_time[1] = 0;
  for (int i = 0; i < count; i++) {
    Fiber& fiber = fibers[i];
    Thread& t = fiber.self;
    const uint32_t in_group[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int k = 0; k < 3; k++) {
      t.in_threadgroup[k] = in_group[k], t.place[k] = position[k], t.threads[k] = size[k];
      t.in_grid[k] = position[k] * launch->threadgroup[k] + in_group[k];
    }
    t.index = i, t.lane = i % 32, t.simdgroup = i / 32;
    for (Exchange& exchange : simdgroups[i / 32].exchanges) exchange.lanes |= 1u << (i % 32);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i].data();
    fiber.context.uc_stack.ss_size = stacks[i].size();
    makecontext(&fiber.context, run_thread, 0);
  }
  ready.clear();
  release(0, count);
  while (!ready.empty()) give_turn(next_thread());
  for (const Fiber& fiber : fibers)
    if (fiber.state != ENDED) {
      explain_standstill();
      _longjmp(failed, 1);
    }
}

static void run_threadgroups() {
  uint32_t counts[3];
  for (int k = 0; k < 3; k++) counts[k] = (launch->grid[k] + launch->threadgroup[k] - 1) / launch->threadgroup[k];
  std::vector<uint32_t> numbers(counts[0] * counts[1] * counts[2]);
  for (size_t i = 0; i < numbers.size(); i++) numbers[i] = i;
  if (launch->order == 1) std::reverse(numbers.begin(), numbers.end());
  if (launch->order == 2) std::shuffle(numbers.begin(), numbers.end(), randomness);
  for (uint32_t number : numbers) {
    const uint32_t position[3] = {number % counts[0], number / counts[0] % counts[1], number / counts[0] / counts[1]};
    uint32_t size[3];  // threadgroups at the grid's edge are smaller
    for (int k = 0; k < 3; k++)
      size[k] = std::min(launch->threadgroup[k], launch->grid[k] - position[k] * launch->threadgroup[k]);
    run_threadgroup(position, size, number);
  }
}

// Returns what was found to be wrong, or "".
extern "C" const char* emulate(Kernel run, Launch* wanted, Buffer* buffers, int count) {
  launch = wanted, kernel = run;
  report.clear(), reported.clear(), regions.clear(), arguments.clear();
  matrix_operations = 0;
  randomness.seed(launch->seed);
  size_t bytes = 4 * APART + 4 * THREADGROUP_MEMORY;
  for (int i = 0; i < count; i++) bytes += buffers[i].bytes + 2 * APART;
  memory.assign(bytes, char(0xff));
  size_t at = APART / 64 * 64 + (64 - uintptr_t(memory.data()) % 64);
  for (int i = 0; i < count; i++) {
    char* start = memory.data() + at;
    memcpy(start, buffers[i].data, buffers[i].bytes);
    Byte byte{};
    byte.filled = !buffers[i].is_output;
    regions.push_back({start, buffers[i].bytes, buffers[i].name, DEVICE, &buffers[i],
                       std::vector<Byte>(launch->checked ? buffers[i].bytes : 0, byte)});
    arguments.push_back(start);
    at += (buffers[i].bytes + 63) / 64 * 64 + APART;
  }
  first_variable = regions.size();
  variables_start = at;
  if (!_setjmp(failed)) {
    run_threadgroups();
    for (int i = 0; i < count; i++)
      if (buffers[i].is_output)
        for (size_t k = 0; k < regions[i].shadow.size(); k++)
          if (!regions[i].shadow[k].filled) {
            say("never written: byte %zu of %zu of %s", k, regions[i].bytes, regions[i].name);
            break;
          }
  }
  for (int i = 0; i < count; i++) memcpy(buffers[i].data, arguments[i], buffers[i].bytes);
  launch->matrix_operations = matrix_operations;
  return report.c_str();
}

}  // namespace emulator

// What g++ calls with -fsanitize=thread before each access to memory; its own library is not linked.
#define FROM uintptr_t(__builtin_return_address(0))
#define HOOKS(bytes) \
  extern "C" void __tsan_read##bytes(void* p) { emulator::touch(p, bytes, false, FROM); } \
  extern "C" void __tsan_write##bytes(void* p) { emulator::touch(p, bytes, true, FROM); } \
  extern "C" void __tsan_unaligned_read##bytes(void* p) { emulator::touch(p, bytes, false, FROM); } \
  extern "C" void __tsan_unaligned_write##bytes(void* p) { emulator::touch(p, bytes, true, FROM); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t bytes) { emulator::touch(p, bytes, false, FROM); }
extern "C" void __tsan_write_range(void* p, size_t bytes) { emulator::touch(p, bytes, true, FROM); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
// And with -fsanitize=bounds,shift where an index is too large for an array, or a number of bits for a word.
struct Where { const char* file; uint32_t line, column; };
static void complain(void* where, const char* format, uintptr_t value) {
  char text[100];
  snprintf(text, sizeof text, format, long(value));
  emulator::fail(static_cast<Where*>(where)->line, text);
}
extern "C" void __ubsan_handle_out_of_bounds(void* where, uintptr_t index) {
  complain(where, "index %ld is out of an array's bounds", index);
}
extern "C" void __ubsan_handle_shift_out_of_bounds(void* where, uintptr_t, uintptr_t by) {
  complain(where, "a word is shifted by %ld bits", by);
}
