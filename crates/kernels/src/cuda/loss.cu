// Cross-entropy over rows of logits, one block to a row. With target weights 1 − spread more at the label and `off`
// everywhere: loss = lse − Σ target·x, and, where wanted, x ← (softmax − target)·w in place.
//
// The row is read once for its maximum and Σ exp(x − max) together, each thread rescaling its sum as its maximum
// grows, and once more to be overwritten.

#define IGNORE (-100)

struct LossArgs {
    u64 logits, labels, weights, loss, fault;
    i64 stride;
    // Columns of a row, and those of them that exist.
    i32 width, vocab;
    // Share of the target that is spread over the vocabulary, and what one column has of it.
    float spread, off;
};

#define INFINITY_F __int_as_float(0x7f800000)

// eˣ for x <= 0. What is rounded to bf16 needs no more than the hardware's power of two of a rounded product.
template <class T> __device__ __forceinline__ float exponential(float x);
template <> __device__ __forceinline__ float exponential<float>(float x) { return expf(x); }
template <> __device__ __forceinline__ float exponential<bf16>(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

__device__ __forceinline__ double block_sum(double x, double* shared) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    const int warps = blockDim.x >> 5;
    x = (threadIdx.x & 31) < warps ? shared[threadIdx.x & 31] : 0.0;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// The first `count` columns of a row as aligned 16-byte chunks [first, last) and what is left at both ends: chunk c
// starts at column c·V − skew. Rows of odd length are aligned differently each.
template <class T> struct Cut {
    static constexpr int V = Wide<T>::count;
    i32 skew, first, last, head, tail, count;
    __device__ __forceinline__ Cut(const T* row, i32 count) : count(count) {
        skew = i32(reinterpret_cast<u64>(row) & 15) / i32(sizeof(T));
        first = skew ? 1 : 0;
        last = max((count + skew) / V, first);
        head = skew ? min(V - skew, count) : 0;
        tail = min(max(last * V - skew, head), count);
    }
    __device__ __forceinline__ i32 start(i32 chunk) const { return chunk * V - skew; }
    // The column of an end that is this thread's, or −1; there are fewer than 2V of them, and a warp has 32 threads.
    __device__ __forceinline__ i32 end() const {
        const i32 t = threadIdx.x;
        if (t < head) return t;
        const i32 column = tail + (t - head);
        return column < count ? column : -1;
    }
};

template <class T> __device__ __forceinline__ void fill_zero(T* row, i32 count) {
    const Cut<T> cut(row, count);
    const i32 end = cut.end();
    if (end >= 0) row[end] = from_f32<T>(0.0f);
    for (i32 c = cut.first + threadIdx.x; c < cut.last; c += blockDim.x)
        *reinterpret_cast<Packed<T>*>(row + cut.start(c)) = {};
}

// Running maximum, Σ exp(x − max) and, with smoothing, Σ x of what a thread has seen.
template <class T> struct Running {
    float max = -INFINITY_F, sum = 0.0f;
    double all = 0.0;
    // −∞ − −∞ would be NaN, though nothing but −∞ has been seen so far.
    __device__ __forceinline__ float shift() const { return max == -INFINITY_F ? 0.0f : max; }
    __device__ __forceinline__ void raise(float to) {
        if (to > max) {
            sum *= exponential<T>(max - to);
            max = to;
        }
    }
};

// Chunks of a thread that are on their way together.
#define AT_ONCE 4

template <class T> __device__ __forceinline__ Running<T> statistics(const T* row, i32 vocab, bool with_sum) {
    constexpr int V = Wide<T>::count;
    Running<T> seen;
    const Cut<T> cut(row, vocab);
    const i32 end = cut.end();
    if (end >= 0) {
        const float x = to_f32(row[end]);
        seen.raise(x);
        seen.sum = exponential<T>(x - seen.shift());
        seen.all = x;
    }
    for (i32 c = cut.first + threadIdx.x; c < cut.last; c += blockDim.x * AT_ONCE) {
        Packed<T> held[AT_ONCE];
        i32 present = 0;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const i32 chunk = c + k * blockDim.x;
            // −∞ counts for nothing.
#pragma unroll
            for (int w = 0; w < 4; w++) held[k].word[w] = sizeof(T) == 2 ? 0xff80ff80u : 0xff800000u;
            if (chunk < cut.last) {
                held[k] = *reinterpret_cast<const Packed<T>*>(row + cut.start(chunk));
                present++;
            }
        }
        float most = -INFINITY_F;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            float x[V];
            unpack(held[k], x);
#pragma unroll
            for (int i = 0; i < V; i++) most = fmaxf(most, x[i]);
        }
        seen.raise(most);
        const float shift = seen.shift();
        // One partial sum per chunk, so that long rows lose nothing.
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            float x[V], part = 0.0f;
            unpack(held[k], x);
#pragma unroll
            for (int i = 0; i < V; i++) part += exponential<T>(x[i] - shift);
            seen.sum += part;
            if (with_sum && k < present) {
                part = 0.0f;
#pragma unroll
                for (int i = 0; i < V; i++) part += x[i];
                seen.all += part;
            }
        }
    }
    return seen;
}

// x ← (factor·exp(x − max) − off − (1 − spread)·1[label])·w
template <class T>
__device__ __forceinline__ void gradient(
    const LossArgs& a, T* row, i32 label, float max, float factor, float w
) {
    constexpr int V = Wide<T>::count;
    const Cut<T> cut(row, a.vocab);
    auto slope = [&](float x, i32 column) {
        const float p = factor * exponential<T>(x - max) - a.off;
        return (column == label ? p - (1.0f - a.spread) : p) * w;
    };
    const i32 end = cut.end();
    if (end >= 0) row[end] = from_f32<T>(slope(to_f32(row[end]), end));
    for (i32 c = cut.first + threadIdx.x; c < cut.last; c += blockDim.x * AT_ONCE) {
        Packed<T> held[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const i32 chunk = c + k * blockDim.x;
            if (chunk < cut.last) held[k] = *reinterpret_cast<const Packed<T>*>(row + cut.start(chunk));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const i32 chunk = c + k * blockDim.x;
            if (chunk >= cut.last) continue;
            float x[V];
            unpack(held[k], x);
#pragma unroll
            for (int i = 0; i < V; i++) x[i] = slope(x[i], cut.start(chunk) + i);
            *reinterpret_cast<Packed<T>*>(row + cut.start(chunk)) = pack(x);
        }
    }
    for (i32 c = a.vocab + threadIdx.x; c < a.width; c += blockDim.x) row[c] = from_f32<T>(0.0f);
}

template <class T, bool GRADIENT> __device__ __forceinline__ void cross_entropy(const LossArgs& a) {
    __shared__ float shared[32];
    __shared__ double shared_all[32];
    const i64 r = blockIdx.x;
    T* row = reinterpret_cast<T*>(a.logits) + r * a.stride;
    float* loss = reinterpret_cast<float*>(a.loss) + r;
    const i32 label = reinterpret_cast<const i32*>(a.labels)[r];
    if (label < 0 || label >= a.vocab) {
        if (threadIdx.x == 0) {
            if (label != IGNORE) fault(a.fault, FAULT_LABEL);
            *loss = 0.0f;
        }
        if (GRADIENT) fill_zero(row, a.width);
        return;
    }
    // Before anything is overwritten.
    const float at_label = to_f32(row[label]);
    const bool smooth = a.spread != 0.0f;
    const Running<T> seen = statistics(row, a.vocab, smooth);
    const float max = block_max(seen.max, shared);
    // A thread that saw nothing, or only −∞, has the sum 0, or NaN if it saw one.
    const float own = seen.max == max ? seen.sum : seen.sum * exponential<T>(seen.max - max);
    const float sum = block_sum(own, shared);
    const double all = smooth ? block_sum(seen.all, shared_all) : 0.0;
    if (threadIdx.x == 0) {
        const float log_sum = logf(sum);
        const float plain = log_sum - (at_label - max);
        const float mean = float(all) / float(a.vocab);
        *loss = smooth ? (1.0f - a.spread) * plain + a.spread * (log_sum - (mean - max)) : plain;
    }
    if (GRADIENT) gradient(a, row, label, max, 1.0f / sum, reinterpret_cast<const float*>(a.weights)[r]);
}

#define KERNELS(T, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_##NAME(const LossArgs a) {                 \
        cross_entropy<T, false>(a);                                                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_gradient_##NAME(const LossArgs a) {        \
        cross_entropy<T, true>(a);                                                                                \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
