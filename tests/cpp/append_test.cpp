#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "owned_tensor.h"
#include "raddle/error.h"
#include "raddle/kv.h"

namespace raddle {
namespace {

using std::size_t;

/// A batch of new rows and a pool, drawn at random. Elements are numbered bit patterns, never
/// arithmetic.
struct Batch {
  std::vector<i32> qo_indptr{0}, kv_len, page_indptr{0}, page_indices;
  i32 page_size = 1, heads = 1, k_dim = 8, v_dim = 8, pages = 0;
  HeadOrder order = HeadOrder::nhd;
  DType dtype = DType::bfloat16;

  Batch(std::mt19937& random, i32 page_rows, HeadOrder head_order)
      : page_size(page_rows), order(head_order) {
    const auto draw = [&](i32 low, i32 high) {
      return low + static_cast<i32>(random() % static_cast<unsigned>(high - low + 1));
    };
    heads = draw(1, 4);
    k_dim = 8 * draw(1, 3);
    v_dim = 8 * draw(1, 3);
    dtype = draw(0, 1) ? DType::bfloat16 : DType::float32;
    const i32 requests = draw(1, 6);
    for (i32 i = 0; i < requests; ++i) {
      const i32 qo_len = draw(0, 9);
      kv_len.push_back(qo_len + draw(0, 40));
      qo_indptr.push_back(qo_indptr.back() + qo_len);
      page_indptr.push_back(page_indptr.back() + (kv_len.back() + page_size - 1) / page_size +
                            draw(0, 2));
    }
    pages = page_indptr.back() + draw(0, 5);
    std::vector<i32> numbers(static_cast<size_t>(pages));
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random);
    page_indices.assign(numbers.begin(), numbers.begin() + page_indptr.back());
  }

  i32 rows() const { return qo_indptr.back(); }

  LayoutPtr layout() const {
    PagedArgs args;
    args.qo_indptr = {qo_indptr.data(), static_cast<i64>(qo_indptr.size())};
    args.page_indptr = {page_indptr.data(), static_cast<i64>(page_indptr.size())};
    args.page_indices = {page_indices.data(), static_cast<i64>(page_indices.size())};
    args.kv_len = {kv_len.data(), static_cast<i64>(kv_len.size())};
    args.page_size = page_size;
    args.order = order;
    return paged_kv(args);
  }
};

struct Owned : testing_tensors::OwnedTensor {
  using OwnedTensor::OwnedTensor;
  void number(std::mt19937& random) {
    for (u8& b : bytes) b = static_cast<u8>(random());
  }
};

void copy_head(const TensorRef& from, i64 row, i64 head, const TensorRef& to, i64 at, i64 dim) {
  const i64 bytes = dtype_bytes(from.dtype);
  const u8* source =
      static_cast<const u8*>(from.data) + (row * from.stride[0] + head * from.stride[1]) * bytes;
  std::copy_n(source, dim * bytes, static_cast<u8*>(to.data) + at * bytes);
}

/// The definition, a key at a time.
void append_by_hand(const Batch& batch, const TensorRef& rows, const TensorRef& pool) {
  const bool nhd = batch.order == HeadOrder::nhd;
  for (size_t i = 0; i < batch.kv_len.size(); ++i) {
    const i32 qo_len = batch.qo_indptr[i + 1] - batch.qo_indptr[i];
    for (i32 r = 0; r < qo_len; ++r) {
      const i32 key = batch.kv_len[i] - qo_len + r;
      const i64 page =
          batch.page_indices[static_cast<size_t>(batch.page_indptr[i] + key / batch.page_size)];
      const i64 slot = key % batch.page_size;
      for (i64 h = 0; h < batch.heads; ++h) {
        const i64 at = page * pool.stride[0] + (nhd ? slot : h) * pool.stride[1] +
                       (nhd ? h : slot) * pool.stride[2];
        copy_head(rows, batch.qo_indptr[i] + r, h, pool, at, rows.shape[2]);
      }
    }
  }
}

std::vector<i64> pool_shape(const Batch& b, i64 dim) {
  if (b.order == HeadOrder::nhd) return {b.pages, b.page_size, b.heads, dim};
  return {b.pages, b.heads, b.page_size, dim};
}

/// Tensors for a batch.
struct Tensors {
  Owned k_new, v_new, k_pool, v_pool;
  Tensors(const Batch& b, i64 gap)
      : k_new(b.dtype, {b.rows(), b.heads, b.k_dim}, gap, 0),
        v_new(b.dtype, {b.rows(), b.heads, b.v_dim}, 0, 0),
        k_pool(b.dtype, pool_shape(b, b.k_dim), gap, 0xee),
        v_pool(b.dtype, pool_shape(b, b.v_dim), 3 * gap, 0xdd) {}
};

TEST(Append, MatchesTheDefinition) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const i32 page_size = std::vector<i32>{1, 3, 16, 7}[random() % 4];
    const Batch batch(random, page_size, random() % 2 ? HeadOrder::nhd : HeadOrder::hnd);
    Tensors t(batch, random() % 2 ? 5 : 0);
    t.k_new.number(random);
    t.v_new.number(random);
    Owned k_expected = t.k_pool, v_expected = t.v_pool;
    append_by_hand(batch, t.k_new.ref, k_expected.ref);
    append_by_hand(batch, t.v_new.ref, v_expected.ref);
    append_kv(*batch.layout(), t.k_new.ref, t.v_new.ref, {t.k_pool.ref, t.v_pool.ref});
    // Whole buffers: gaps and all other slots keep what they held.
    ASSERT_EQ(t.k_pool.bytes, k_expected.bytes);
    ASSERT_EQ(t.v_pool.bytes, v_expected.bytes);
  }
}

TEST(Append, LargeBatchesGoToThePool) {
  std::mt19937 random(3);
  Batch batch(random, 16, HeadOrder::nhd);
  batch.heads = 8;
  batch.k_dim = batch.v_dim = 128;
  batch.dtype = DType::bfloat16;
  batch.qo_indptr = {0, 0, 700, 701, 701, 2001};
  batch.kv_len = {17, 900, 1, 0, 1300};
  batch.page_indptr = {0, 2, 59, 60, 60, 142};
  batch.pages = 142;
  batch.page_indices.resize(142);
  std::iota(batch.page_indices.rbegin(), batch.page_indices.rend(), 0);
  Tensors t(batch, 0);
  t.k_new.number(random);
  t.v_new.number(random);
  Owned expected = t.k_pool;
  append_by_hand(batch, t.k_new.ref, expected.ref);
  append_kv(*batch.layout(), t.k_new.ref, t.v_new.ref, {t.k_pool.ref, t.v_pool.ref});
  EXPECT_EQ(t.k_pool.bytes, expected.bytes);
}

TEST(Append, KAndVInterleavedInOnePool) {
  std::mt19937 random(4);
  Batch batch(random, 3, HeadOrder::nhd);
  batch.v_dim = batch.k_dim;
  Tensors t(batch, 0);
  t.k_new.number(random);
  t.v_new.number(random);
  // [pages, 2, page_size, heads, dim]: K and V are views with a page stride of two pages.
  const i64 page = i64{batch.page_size} * batch.heads * batch.k_dim;
  Owned both(batch.dtype, {batch.pages, 2, page}, 0, 0xcc), expected = both;
  const auto half = [&](Owned& pool, i64 which) {
    TensorRef view = t.k_pool.ref;
    view.data = pool.bytes.data() + which * page * dtype_bytes(batch.dtype);
    view.stride[0] = 2 * page;
    return view;
  };
  append_by_hand(batch, t.k_new.ref, half(expected, 0));
  append_by_hand(batch, t.v_new.ref, half(expected, 1));
  append_kv(*batch.layout(), t.k_new.ref, t.v_new.ref, {half(both, 0), half(both, 1)});
  EXPECT_EQ(both.bytes, expected.bytes);
}

/// What appending says of a batch that `damage` has spoilt; checks that nothing was written.
std::string error_of(const std::function<void(Batch&)>& damage_batch,
                     const std::function<void(Tensors&)>& damage_tensors) {
  std::mt19937 random(11);
  Batch batch(random, 3, HeadOrder::nhd);
  batch.qo_indptr = {0, 4, 4, 6};
  batch.kv_len = {10, 5, 2};
  batch.page_indptr = {0, 4, 6, 7};
  batch.page_indices = {6, 5, 4, 3, 2, 1, 0};
  batch.pages = 7;
  batch.heads = 2;
  batch.k_dim = batch.v_dim = 8;
  batch.dtype = DType::bfloat16;
  Tensors t(batch, 0);
  if (damage_batch) damage_batch(batch);
  if (damage_tensors) damage_tensors(t);
  const auto k_before = t.k_pool.bytes, v_before = t.v_pool.bytes;
  std::string text;
  try {
    append_kv(*batch.layout(), t.k_new.ref, t.v_new.ref, {t.k_pool.ref, t.v_pool.ref});
    return "";
  } catch (const std::invalid_argument& error) {
    text = error.what();
  }
  EXPECT_EQ(t.k_pool.bytes, k_before);
  EXPECT_EQ(t.v_pool.bytes, v_before);
  return text;
}

void expect_error(const std::string& text, const std::string& name, const std::string& found) {
  EXPECT_NE(text.find(name), std::string::npos) << text;
  EXPECT_NE(text.find(found), std::string::npos) << text;
  EXPECT_NE(text.find("expected"), std::string::npos) << text;
}

TEST(Append, NamesBadTensors) {
  const auto tensors = [](const std::function<void(Tensors&)>& damage) {
    return error_of(nullptr, damage);
  };
  EXPECT_EQ(error_of(nullptr, nullptr), "");
  expect_error(tensors([](Tensors& t) { t.k_new.ref.rank = 2; }), "k_new", "2 dimensions");
  expect_error(tensors([](Tensors& t) { t.v_pool.ref.rank = 3; }), "pool.v", "3 dimensions");
  expect_error(tensors([](Tensors& t) { t.k_new.ref.shape[0] = 5; }), "k_new", "5 rows");
  expect_error(tensors([](Tensors& t) { t.v_new.ref.shape[2] = 7; }), "v_new", "7");
  expect_error(tensors([](Tensors& t) { t.v_pool.ref.shape[1] = 2; }), "pool.v", "page_size 2");
  expect_error(tensors([](Tensors& t) { t.v_pool.ref.shape[2] = 1; }), "pool.v", "1 heads");
  expect_error(tensors([](Tensors& t) { t.v_pool.ref.dtype = DType::float16; }), "v_new",
               "bfloat16");
  expect_error(tensors([](Tensors& t) { t.k_pool.ref.stride[3] = 2; }), "pool.k", "stride 2");
  expect_error(tensors([](Tensors& t) { t.k_pool.ref.stride[0] = 0; }), "pool.k", "stride 0");
  expect_error(tensors([](Tensors& t) { t.v_pool.ref.shape[0] = 4; }), "page_indices",
               "4 as page 2");
  EXPECT_NE(tensors([](Tensors& t) { t.v_new.ref.data = nullptr; }).find("v_new has no data"),
            std::string::npos);
  expect_error(tensors([](Tensors& t) {
                 t.v_new.ref.shape[1] = 1;
                 t.v_pool.ref.shape[2] = 1;
               }),
               "v_new", "1 heads");
}

TEST(Append, NamesBadPages) {
  const auto pages = [](const std::function<void(Batch&)>& damage) {
    return error_of(damage, nullptr);
  };
  expect_error(pages([](Batch& b) { b.page_indices[3] = -1; }), "page_indices",
               "-1 as page 3 of request 0");
  expect_error(pages([](Batch& b) { b.page_indices[6] = 7; }), "page_indices",
               "7 as page 0 of request 2");
  expect_error(pages([](Batch& b) { b.kv_len[2] = 1; }), "kv_len[2]", "1");
  // Pages without new rows may be anything.
  EXPECT_EQ(pages([](Batch& b) { b.page_indices[1] = -1; }), "");
  EXPECT_EQ(pages([](Batch& b) { b.page_indices[4] = 1000; }), "");
}

TEST(Append, RefusesOtherLayouts) {
  const std::vector<i32> indptr{0, 2};
  const LayoutPtr ragged =
      ragged_kv({.qo_indptr = {indptr.data(), 2}, .kv_indptr = {indptr.data(), 2}});
  std::mt19937 random(1);
  Tensors t(Batch(random, 3, HeadOrder::nhd), 0);
  EXPECT_THROW(append_kv(*ragged, t.k_new.ref, t.v_new.ref, {t.k_pool.ref, t.v_pool.ref}),
               ValueError);
}

}  // namespace
}  // namespace raddle
