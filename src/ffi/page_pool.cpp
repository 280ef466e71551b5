// The page pool.
#include "raddle/page_pool.h"

#include <tvm/ffi/reflection/registry.h>

#include "ffi/border.h"
#include "layout/index.h"

namespace raddle::border {

namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

PagePool& take_pool(Arguments& in) { return *in.object<PagePoolObj>("pool").value; }

std::vector<i32> take_integers(Arguments& in, const char* name) {
  return copy_index(name, in.index(name));
}

ffi::ObjectRef make(Arguments& in) {
  const i32 num_pages = in.integer32("num_pages");
  return wrap<PagePoolObj>(std::make_shared<PagePool>(num_pages, in.integer32("page_size", 16)));
}

Fields counts(Arguments& in) {
  const PagePool& pool = take_pool(in);
  const PageCounts counts = pool.counts();
  return {{"num_pages", pool.num_pages()}, {"page_size", pool.page_size()},
          {"used", counts.used},           {"free", counts.free},
          {"shared", counts.shared},       {"num_requests", pool.num_requests()}};
}

ffi::Tensor references(Arguments& in) {
  const PagePool& pool = take_pool(in);
  return array_of(pool.references(take_integers(in, "pages")));
}

/// None where there are not enough.
ffi::Any allocate(Arguments& in) {
  PagePool& pool = take_pool(in);
  auto pages = pool.allocate(in.integer32("count", 0));
  if (!pages) return nullptr;
  return array_of(std::move(*pages));
}

void retain(Arguments& in) {
  PagePool& pool = take_pool(in);
  pool.retain(take_integers(in, "pages"));
}

ffi::Tensor release(Arguments& in) {
  PagePool& pool = take_pool(in);
  return array_of(pool.release(take_integers(in, "pages")));
}

RequestId add(Arguments& in) {
  PagePool& pool = take_pool(in);
  const IndexRef pages = in.index("pages");
  const auto numbers = pages.empty() ? std::vector<i32>{} : copy_index("pages", pages);
  return pool.add(numbers, in.optional_integer32("kv_len"));
}

ffi::Tensor fork(Arguments& in) {
  PagePool& pool = take_pool(in);
  const RequestId request = in.integer("request", -1);
  return array_of(pool.fork(request, in.integer32("count", 1)));
}

Fields append(Arguments& in) {
  PagePool& pool = take_pool(in);
  const std::vector<RequestId> requests = in.requests("requests");
  Appended done = pool.append(requests, take_integers(in, "counts"));
  return {{"missing", done.missing},
          {"from_pages", array_of(std::move(done.copy_from))},
          {"to_pages", array_of(std::move(done.copy_to))}};
}

ffi::Tensor truncate(Arguments& in) {
  PagePool& pool = take_pool(in);
  const std::vector<RequestId> requests = in.requests("requests");
  return array_of(pool.truncate(requests, take_integers(in, "kv_len")));
}

ffi::Tensor replace(Arguments& in) {
  PagePool& pool = take_pool(in);
  const RequestId request = in.integer("request", -1);
  return array_of(pool.replace(request, take_integers(in, "pages")));
}

ffi::Tensor finish(Arguments& in) {
  PagePool& pool = take_pool(in);
  return array_of(pool.finish(in.requests("requests")));
}

i64 kv_len(Arguments& in) {
  const PagePool& pool = take_pool(in);
  return pool.kv_len(in.integer("request", -1));
}

ffi::Tensor pages(Arguments& in) {
  const PagePool& pool = take_pool(in);
  return array_of(pool.pages(in.integer("request", -1)));
}

Fields tables(Arguments& in) {
  const PagePool& pool = take_pool(in);
  PageTables tables = pool.tables(in.requests("requests"));
  return {{"page_indptr", array_of(std::move(tables.page_indptr))},
          {"page_indices", array_of(std::move(tables.page_indices))},
          {"kv_len", array_of(std::move(tables.kv_len))}};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::ObjectDef<PagePoolObj>();
  ffi::reflection::GlobalDef()
      .def_packed("raddle.page_pool", exported(make))
      .def_packed("raddle.page_pool.counts", exported(counts))
      .def_packed("raddle.page_pool.references", exported(references))
      .def_packed("raddle.page_pool.allocate", exported(allocate))
      .def_packed("raddle.page_pool.retain", exported(retain))
      .def_packed("raddle.page_pool.release", exported(release))
      .def_packed("raddle.page_pool.add", exported(add))
      .def_packed("raddle.page_pool.fork", exported(fork))
      .def_packed("raddle.page_pool.append", exported(append))
      .def_packed("raddle.page_pool.truncate", exported(truncate))
      .def_packed("raddle.page_pool.replace", exported(replace))
      .def_packed("raddle.page_pool.finish", exported(finish))
      .def_packed("raddle.page_pool.kv_len", exported(kv_len))
      .def_packed("raddle.page_pool.pages", exported(pages))
      .def_packed("raddle.page_pool.tables", exported(tables));
}

}  // namespace raddle::border
