// What a compiled kernel and the emulator's runtime (runtime.cpp) know of each other.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

// What a thread of a kernel can ask about itself.
struct Thread {
  uint32_t in_grid[3], in_threadgroup[3], place[3], threads[3];
  uint32_t index, lane, simdgroup;
};

// What the lanes of a simdgroup have given to each other, up to 64 bytes each, and which of the 32 lanes there are.
struct Exchange {
  alignas(64) unsigned char given[32][64];
  uint32_t lanes;
};

extern Thread* current;
extern uint64_t matrix_operations;

// Waits until all lanes of the simdgroup have come to the same operation on the same line.
const Exchange& exchange(int operation, int line, const void* value, size_t bytes);
// Barriers; `memory` has bit 1 for device memory and bit 2 for a threadgroup's.
void wait_for_threadgroup(int memory, int line);
void wait_for_simdgroup(int memory, int line);
// A threadgroup variable: the same place for all threads of a threadgroup.
void* threadgroup_variable(const char* name, size_t bytes);
[[noreturn]] void fail(int line, const char* what);

}  // namespace emulator
