// Every kernel with one and the same signature: arguments in an array of 64-bit words.
//
// Included within each instruction set's namespace, after the kernels (see common.h on inlining).

namespace headrace::HR_ISA {
namespace {

// A type's letter in signatures, and its value out of a word.
template <class T> struct FromWord;
template <class T> struct FromWord<T*> {
  static constexpr char letter = 'P';
  static T* get(Word w) { return static_cast<T*>(const_cast<void*>(w.pointer)); }
};
template <> struct FromWord<int64_t> {
  static constexpr char letter = 'L';
  static int64_t get(Word w) { return w.integer; }
};
template <> struct FromWord<int32_t> {
  static constexpr char letter = 'I';
  static int32_t get(Word w) { return int32_t(w.integer); }
};
template <> struct FromWord<float> {
  static constexpr char letter = 'F';
  static float get(Word w) { return float(w.real); }
};
template <> struct FromWord<double> {
  static constexpr char letter = 'D';
  static double get(Word w) { return w.real; }
};
template <> struct FromWord<void> { static constexpr char letter = 'V'; };

template <size_t... I> struct Indices {};
template <size_t N, size_t... I> struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I> struct MakeIndices<0, I...> { using type = Indices<I...>; };

template <auto function> struct Uniform;
template <class Result, class... Args, Result (*function)(Args...)> struct Uniform<function> {
  static constexpr char signature[] = {FromWord<Result>::letter, FromWord<Args>::letter..., 0};
  template <size_t... I> static int32_t spread(const Word* words, Indices<I...>) {
    // The kernel's one copy is called, through a pointer that the compiler knows nothing of. A
    // second copy inlined here was optimised worse: a prefill was a quarter slower.
    auto* kernel = function;
    asm("" : "+r"(kernel));
    if constexpr (__is_same(Result, int32_t)) {
      return kernel(FromWord<Args>::get(words[I])...);
    } else {
      kernel(FromWord<Args>::get(words[I])...);  // nothing can go wrong in it
      return OK;
    }
  }
  static int32_t call(const Word* words) {
    return spread(words, typename MakeIndices<sizeof...(Args)>::type{});
  }
};

}  // namespace
}  // namespace headrace::HR_ISA
