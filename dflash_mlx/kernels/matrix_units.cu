// sums += left @ right on the matrix units (PTX: mma.m16n8k16), numbers of bfloat16 or float16, sums in float.
template <bool BRAIN>
__device__ inline void multiply_accumulate(float (&sums)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  if constexpr (BRAIN)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// 2 to this power, 0 where that is below the smallest normal number.
__device__ inline float power_of_two(float power) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(power));
  return found;
}

// The memory of a block of threads, as much as it was launched with.
template <typename T>
__device__ inline T* block_memory() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<T*>(memory);
}

// Have 16 bytes copied to the block's memory while the thread goes on. Copies that were asked for since the last time
// make a group; a thread can wait until no more than the last LEFT groups are still on their way.
__device__ inline void copy_async(void* to, const void* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ inline void copies_asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
