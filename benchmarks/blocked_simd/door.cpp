// Doors for ctypes to the loops of bench.cpp, for one table (table.h): batches of uniform costs and of
// costs per stage, each in blocks of 128 configurations, the fastest of its sizes, on all cores.
#define main bench_main  // the program that times itself is not used here
#include "bench.cpp"
#undef main

template <class F> static void on_threads(int n, int threads, const F& solve) {
  const int part = (n / threads + 1023) / 1024 * 1024;  // a multiple of every block
  std::vector<std::thread> others;
  for (int k = 1; k < threads; ++k)
    if (k * part < n) others.emplace_back([&, k] { solve(k * part, k == threads - 1 ? n : std::min(n, (k + 1) * part)); });
  solve(0, threads == 1 ? n : std::min(n, part));
  for (auto& other : others) other.join();
}

// costs stay in the vectors that the loops read: what copies them there is not timed
template <class T> struct Batch { In<T> uniform; InS<T> stage; bool per_stage; };

template <class T> static void* load(const T* tF, const T* tB, const T* c, int n, bool per_stage) {
  auto* batch = new Batch<T>;
  batch->per_stage = per_stage;
  const size_t rows = (size_t)n * (per_stage ? NS : 1);
  if (per_stage) batch->stage = {{tF, tF + rows}, {tB, tB + rows}, {c, c + n}, n};
  else batch->uniform = {{tF, tF + rows}, {tB, tB + rows}, {c, c + n}};
  return batch;
}

template <class T> static void run(const void* loaded, T* out, int n, int threads) {
  const auto& batch = *static_cast<const Batch<T>*>(loaded);
  on_threads(n, threads, [&](int low, int high) {
    if (batch.per_stage) blocked_stage<T, 128>(batch.stage, out, low, high);
    else blocked<T, 128, true>(batch.uniform, out, low, high);
  });
}

#define DOORS(T, NAME)                                                                                   \
  extern "C" void* load_##NAME(const T* tF, const T* tB, const T* c, int n, int per_stage) { return load<T>(tF, tB, c, n, per_stage); } \
  extern "C" void run_##NAME(const void* loaded, T* out, int n, int threads) { run<T>(loaded, out, n, threads); } \
  extern "C" void free_##NAME(void* loaded) { delete static_cast<Batch<T>*>(loaded); }
DOORS(float, float32)
DOORS(double, float64)
