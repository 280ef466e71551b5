#include "raddle/sample.h"

#include "backend/cuda/sample.h"
#include "backend/kv_tensors.h"
#include "cache/checks.h"
#include "cache/on_device.h"
#include "device/name.h"
#include "raddle/engine/kernel/sampling/alone.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// A parameter that is a number: its range is known to host and device.
struct NumberParameter {
  const char* name;
  const RowNumber& given;
  RowNumbers SampleView::*view;
  float otherwise;  ///< where nothing is given
  bool (*is_valid)(float);
  const char* expected;
};

std::vector<NumberParameter> numbers_of(const SampleArgs& args) {
  using V = SampleView;
  namespace s = sampling;
  const auto temperature = [](float x) { return s::is_temperature(x); };
  const auto top_p = [](float x) { return s::is_top_p(x); };
  const auto min_p = [](float x) { return s::is_min_p(x); };
  const auto repetition = [](float x) { return s::is_repetition(x); };
  const auto penalty = [](float x) { return s::is_penalty(x); };
  const char *finite = "a finite number", *above = "a finite number above 0";
  return {
      {"temperature", args.temperature, &V::temperature, 1.0f, temperature,
       "a finite number of at least 0"},
      {"top_p", args.top_p, &V::top_p, 1.0f, top_p, "a number above 0, at most 1"},
      {"min_p", args.min_p, &V::min_p, 0.0f, min_p, "a number from 0 to 1"},
      {"repetition_penalty", args.repetition_penalty, &V::repetition, 1.0f, repetition, above},
      {"presence_penalty", args.presence_penalty, &V::presence, 0.0f, penalty, finite},
      {"frequency_penalty", args.frequency_penalty, &V::frequency, 0.0f, penalty, finite},
  };
}

void check_device(const char* name, DeviceId device, const TensorRef& logits) {
  if (device != logits.device)
    fail<ValueError>(name, " lies on '", name_of(device), "'; expected '", name_of(logits.device),
                     "', as logits does");
}

RowNumbers view_number(const NumberParameter& p, const TensorRef& logits) {
  const TensorRef& t = p.given.tensor;
  if (!t.data) {
    const float value = p.given.value.value_or(p.otherwise);
    if (!p.is_valid(value)) fail<ValueError>(p.name, " is ", value, "; expected ", p.expected);
    return {nullptr, 0, value};
  }
  const bool of_all = t.rank == 0;
  if (t.dtype != DType::float32 || (!of_all && (t.rank != 1 || dim(t, 0) != dim(logits, 0))))
    fail<ValueError>(p.name, " is ", describe(t), "; expected a number, or [", dim(logits, 0),
                     "] float32: one a row of logits");
  check_device(p.name, t.device, logits);
  const RowNumbers view{static_cast<const float*>(t.data), of_all ? 0 : step(t, 0), 0.0f};
  if (is_gpu(logits.device)) return view;
  for (i64 row = 0; row < (of_all ? 1 : dim(t, 0)); ++row)
    if (const float x = sampling::number_of(view, row); !p.is_valid(x))
      fail<ValueError>(p.name, "[", row, "] is ", x, "; expected ", p.expected);
  return view;
}

RowIntegers view_integer(const char* name, const RowInteger& given, const TensorRef& logits,
                         i64 by_row = 0) {
  const IndexRef& array = given.array;
  if (array.empty()) return {nullptr, 0, given.value.value_or(0), given.value ? 0 : by_row, false};
  if (array.rank != 1 || array.shape[0] != dim(logits, 0))
    fail<ValueError>(name, " has shape [", array.shape[0],
                     array.rank > 1 ? ", " + std::to_string(array.shape[1]) : "",
                     "]; expected an integer, or [", dim(logits, 0), "]: one a row of logits");
  check_device(name, array.device, logits);
  return {array.data, array.stride[0], 0, 0, array.is_64bit};
}

/// Integers as what checks of memory take: 4 bytes at a time.
TensorRef as_words(const IndexRef& array) {
  TensorRef t;
  t.data = const_cast<void*>(array.data);
  t.device = array.device;
  const i64 words = array.is_64bit ? 2 : 1;
  for (int i = 0; i < array.rank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    t.shape[at] = array.shape[at];
    t.stride[at] = array.stride[at] * words;
  }
  t.rank = array.rank + 1;
  t.shape[static_cast<std::size_t>(array.rank)] = words;
  t.stride[static_cast<std::size_t>(array.rank)] = 1;
  return t;
}

void check_logits(const TensorRef& logits) {
  if (logits.rank != 2 || has_8_bits(logits.dtype))
    fail<ValueError>("logits is ", describe(logits),
                     "; expected [rows, vocab] float32, float16 or bfloat16");
  check_storage("logits", logits);
  if (dim(logits, 1) < 1 || dim(logits, 1) > sampling::max_vocab)
    fail<ValueError>("logits has a vocabulary of ", dim(logits, 1), " tokens; expected 1 to ",
                     sampling::max_vocab);
  if (dim(logits, 0) > 0x7fffffff)
    fail<ValueError>("logits has ", dim(logits, 0), " rows; expected at most 2^31 - 1");
}

void view_counts(const SampleArgs& args, SampleView& view) {
  const IndexRef& counts = args.counts;
  if (counts.empty()) {
    for (const auto& [name, given] : {std::pair{"repetition_penalty", &args.repetition_penalty},
                                      {"presence_penalty", &args.presence_penalty},
                                      {"frequency_penalty", &args.frequency_penalty}})
      if (given->is_given())
        fail<ValueError>(name,
                         " is given without counts; expected counts [rows, vocab] int32, which "
                         "say what tokens the text has");
    return;
  }
  const i64 rows = dim(args.logits, 0), vocab = dim(args.logits, 1);
  if (counts.is_64bit || counts.rank != 2 || counts.shape[0] != rows || counts.shape[1] != vocab ||
      (vocab > 1 && counts.stride[1] != 1))
    fail<ValueError>("counts is not [", rows, ", ", vocab,
                     "] int32 with a contiguous last dimension; expected one count a logit");
  check_device("counts", counts.device, args.logits);
  if (args.count_drawn) check_distinct("counts", as_words(counts));
  view.counts = static_cast<i32*>(const_cast<void*>(counts.data));
  view.counts_row = counts.stride[0];
  view.count_drawn = args.count_drawn;
}

void view_tokens(const SampleArgs& args, SampleView& view) {
  const IndexRef& tokens = args.tokens;
  if (tokens.empty() && dim(args.logits, 0) > 0) fail<TypeError>("out is missing");
  if (tokens.rank != 1 || tokens.shape[0] != dim(args.logits, 0))
    fail<ValueError>("out has ", tokens.shape[0], " elements in ", tokens.rank,
                     " dimensions; expected [", dim(args.logits, 0), "]: one a row of logits");
  check_device("out", tokens.device, args.logits);
  check_distinct("out", as_words(tokens));
  view.tokens = const_cast<void*>(tokens.data);
  view.tokens_step = tokens.stride[0];
  view.tokens_are_64bit = tokens.is_64bit;
}

/// What is written lies apart from all that is read, and from each other.
void check_memory(const SampleArgs& args) {
  const TensorRef tokens = as_words(args.tokens);
  const bool writes_counts = !args.counts.empty() && args.count_drawn;
  std::vector<NamedTensor> written{{"out", tokens}};
  const TensorRef counts = args.counts.empty() ? TensorRef{} : as_words(args.counts);
  if (counts.data) check_apart("out", tokens, "counts", counts);
  if (writes_counts) written.push_back({"counts", counts});
  for (const auto& [name, t] : written) {
    check_apart(name, t, "logits", args.logits);
    for (const NumberParameter& p : numbers_of(args))
      if (p.given.tensor.data) check_apart(name, t, p.name, p.given.tensor);
    for (const auto& [other, given] :
         {std::pair{"top_k", &args.top_k}, {"seed", &args.seed}, {"offset", &args.offset}})
      if (!given->array.empty()) check_apart(name, t, other, as_words(given->array));
  }
}

SampleView view_of(const SampleArgs& args) {
  check_logits(args.logits);
  SampleView view{};
  for (const NumberParameter& p : numbers_of(args)) view.*p.view = view_number(p, args.logits);
  view.top_k = view_integer("top_k", args.top_k, args.logits);
  view.seed = view_integer("seed", args.seed, args.logits);
  view.offset = view_integer("offset", args.offset, args.logits, 1);
  view.logits = args.logits.data;
  view.logits_row = step(args.logits, 0);
  view.num_rows = static_cast<i32>(dim(args.logits, 0));
  view.vocab = static_cast<i32>(dim(args.logits, 1));
  view_counts(args, view);
  view_tokens(args, view);
  check_memory(args);
  return view;
}

/// Why a row whose parameters are fine has no token.
template <class T>
[[noreturn]] void fail_row(const SampleView& view, i64 row) {
  const sampling::RowParameters p = sampling::parameters_of(view, row);
  const sampling::Logits<T> logits(view, p, row);
  for (i32 i = 0; i < view.vocab; ++i)
    if (const float x = logits(i); sampling::key_of(x) >= sampling::key_of_infinity)
      fail<ValueError>("logits[", row, ", ", i, "] is ", x,
                       x == to_float(logits.logits[i]) || x != x ? "" : " with its penalties",
                       "; expected finite numbers and -inf");
  fail<ValueError>("logits[", row, "] has no number above -inf; expected one at least");
}

template <class T>
void sample_on_host(const SampleView& view) {
  std::vector<i32> tokens(static_cast<std::size_t>(view.num_rows));
  const i64 row_bytes = i64{view.vocab} * i64{sizeof(T)} * 8;  // several passes
  share_units(view.num_rows, row_bytes, [&](i64 begin, i64 end) {
    std::vector<i32> indices(static_cast<std::size_t>(view.vocab));
    std::vector<u64> sums(static_cast<std::size_t>(view.vocab / sampling::Alone::span + 1));
    const sampling::Alone alone{indices.data(), sums.data()};
    for (i64 row = begin; row < end; ++row)
      tokens[static_cast<std::size_t>(row)] = sampling::draw_row<T>(alone, view, row);
  });
  for (i64 row = 0; row < view.num_rows; ++row)
    if (tokens[static_cast<std::size_t>(row)] == sampling::no_token) fail_row<T>(view, row);
  for (i64 row = 0; row < view.num_rows; ++row)
    sampling::store_token(view, row, tokens[static_cast<std::size_t>(row)]);
}

}  // namespace

void sample(const SampleArgs& args) {
  const SampleView view = view_of(args);
  if (view.num_rows == 0) return;
  const DType dtype = args.logits.dtype;
  if (is_gpu(args.logits.device)) return cuda::sample(args.logits.device, args.stream, view, dtype);
  dispatch_dtype(dtype, [&](auto t) { sample_on_host<decltype(t)>(view); });
}

}  // namespace raddle
