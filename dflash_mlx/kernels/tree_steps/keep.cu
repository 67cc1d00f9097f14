// Which position is at which place, after a path through a tree is kept: the body of a CUDA kernel (launches.py). A thread
// looks at one place.

const int i = blockIdx.x * THREADS + threadIdx.x, count = length[0];
if (i < placed_shape[0]) {
  int position = placed[i] < count ? placed[i] : NOWHERE;
  for (int at = 0; at < path_shape[0]; at++)
    if (places[path[at]] == i) position = count + at;
  kept[i] = position;
}
