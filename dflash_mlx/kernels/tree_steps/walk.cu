// The target's way through a tree: the body of a CUDA kernel (launches.py). One block with a thread for each row.

__shared__ bool right[THREADS];
__shared__ bool reached[THREADS];
__shared__ float promises[THREADS];

const int rows = depths_shape[0], row = threadIdx.x, most = static_cast<int>(settings[0]);
int parent = 0;
if (row < rows) {
  for (int other = 1; other < row; other++)
    if (visible[row * rows + other]) parent = other;
  right[row] = row == 0 || tokens[row - 1] == choices[parent];
}
__syncthreads();
bool on_path = row < rows;
for (int other = 1; on_path && other <= row; other++)
  if (visible[row * rows + other] && !right[other]) on_path = false;
reached[row] = on_path;
__syncthreads();
promises[row] = row > 0 && row < rows && reached[parent] ? probabilities[row - 1] : 0.0f;
__syncthreads();
if (row < rows) {
  int before = 0, all = 0;
  for (int other = 0; other < rows; other++) {
    all += reached[other];
    before += reached[other] && other < row;
  }
  const int place = reached[row] ? before : all + row - before;
  if (place < most) {
    path[place] = row;
    kept[place] = said[1 + place] = choices[row];
    if (place == all - 1) anchor[0] = choices[row];
  }
  if (row == 0) {
    float promised = 0, depth = 0;
    for (int other = 0; other < rows; other++) {
      promised += promises[other];
      depth = max(depth, static_cast<float>(depths[other]));
    }
    num_accepted[0] = said[0] = all - 1;
    memcpy(&said[1 + most], &promised, 4);
    memcpy(&said[2 + most], &depth, 4);
  }
}
