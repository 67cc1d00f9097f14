// Where a tree's rows go in a cache whose positions are out of order, and what they see there: the body of a CUDA kernel
// (launches.py). A block of threads fills a row of the mask, and each thread looks at a part of the places.

__shared__ int counts[THREADS];

const int capacity = placed_shape[0], rows = depths_shape[0], row = blockIdx.x;
const int part = (capacity + THREADS - 1) / THREADS;
const int begin = min(static_cast<int>(threadIdx.x) * part, capacity), end = min(begin + part, capacity);
const int count = length[0];

int free = 0;
for (int i = begin; i < end; i++) free += placed[i] >= count;
counts[threadIdx.x] = free;
__syncthreads();
// Which of the free places the part's first one is, and with it the row of the tree that is there.
int other = 0;
for (int i = 0; i < threadIdx.x; i++) other += counts[i];

for (int i = begin; i < end; i++) {
  const bool held = placed[i] < count, taken = !held && other < rows;
  mask[static_cast<int64_t>(row) * capacity + i] = taken ? visible[row * rows + other] : held;
  if (row == 0) {
    positions[i] = taken ? count + depths[other] : placed[i];
    if (taken) places[other] = i;
  }
  other += !held;
}
if (threadIdx.x == 0) row_positions[row] = count + depths[row];
