// The likeliest paths, the likeliest first, with their parents, and what the host may want to know: the body of a CUDA
// kernel (launches.py).
// One block of threads. The likeliest paths of each length continue likeliest ones of the length before, so the lengths
// take turns; in the end all of them are put in one order.

__shared__ float sums[MOST_PATHS];    // of each length, falling
__shared__ short before[MOST_PATHS];  // which of the paths of the length before a path continues
__shared__ short last[MOST_PATHS];    // by which candidate of its place
__shared__ short order[MOST_PATHS];   // its place among all paths
__shared__ float continued[MOST_PATHS];
__shared__ int counts[MOST_PATHS];

const int places = log_probs_shape[0];
const int most = pairs[0], branches = pairs[1], continuations = pairs_shape[0] - 1;
constexpr float NEVER = -3e38f;
// Threads that compare one path with others.
constexpr int LANES = 4;

for (int place = 0; place < places; place++) {
  const int known = place == 0 ? 1 : counts[place - 1];
  const float* paths = sums + (place - 1) * most;
  for (int i = threadIdx.x; i < continuations; i += THREADS) {
    const int path = pairs[2 * i + 2], candidate = pairs[2 * i + 3];
    const float own = log_probs[place * branches + candidate] + settings[0];
    continued[i] = path < known ? (place == 0 ? 0.0f : paths[path]) + min(max(own, settings[1]), settings[2]) : NEVER;
  }
  __syncthreads();
  for (int first = 0; first < continuations; first += THREADS / LANES) {
    const int i = first + threadIdx.x / LANES;
    const bool counts_at_all = i < continuations && continued[i] != NEVER;
    int at = 0;
    for (int other = threadIdx.x % LANES; counts_at_all && other < continuations; other += LANES)
      at += continued[other] > continued[i] || (continued[other] == continued[i] && other < i);
    for (int distance = LANES / 2; distance > 0; distance /= 2) at += __shfl_xor_sync(0xffffffff, at, distance);
    if (!counts_at_all || at >= most || threadIdx.x % LANES != 0) continue;
    sums[place * most + at] = continued[i];
    before[place * most + at] = pairs[2 * i + 2];
    last[place * most + at] = pairs[2 * i + 3];
  }
  if (threadIdx.x == 0) {
    int count = 0;
    for (int path = 0; path < known && count < most; path++) count += min(branches, most / (path + 1));
    counts[place] = min(count, most);
  }
  __syncthreads();
}

auto tell = [&](int at, float number) { memcpy(&said[at], &number, 4); };

// Of as likely ones the shorter comes first. How many of a length are likelier is found by halving.
for (int i = threadIdx.x; i < places * most; i += THREADS) {
  const int place = i / most;
  if (i % most >= counts[place]) continue;
  int at = i % most;
  for (int other = 0; other < places; other++) {
    if (other == place) continue;
    int low = 0, high = counts[other];
    while (low < high) {
      const int middle = (low + high) / 2;
      const float sum = sums[other * most + middle];
      if (sum > sums[i] || (sum == sums[i] && other < place)) low = middle + 1;
      else high = middle;
    }
    at += low;
  }
  order[i] = at;
}
__syncthreads();
for (int i = threadIdx.x; i < places * most; i += THREADS) {
  const int place = i / most, at = order[i];
  if (i % most >= counts[place] || at >= most) continue;
  candidates[at] = place * branches + last[i];
  // Row 0 is the anchor.
  parents[at] = place == 0 ? 0 : 1 + order[(place - 1) * most + before[i]];
  tell(places + at, expf(sums[i]));
}
for (int place = threadIdx.x; place < places; place += THREADS) {
  tell(place, expf(log_probs[place * branches]));
  said[places + most + place] = token_ids[place * branches];
}
