// The page pool.
#include "raddle/page_pool.h"

#include "ffi/border.h"
#include "layout/normal_form.h"

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
  Exports()
      .def("raddle.page_pool", make, "num_pages page_size")
      .def("raddle.page_pool.counts", counts, "pool")
      .def("raddle.page_pool.references", references, "pool pages")
      .def("raddle.page_pool.allocate", allocate, "pool count")
      .def("raddle.page_pool.retain", retain, "pool pages")
      .def("raddle.page_pool.release", release, "pool pages")
      .def("raddle.page_pool.add", add, "pool pages kv_len")
      .def("raddle.page_pool.fork", fork, "pool request count")
      .def("raddle.page_pool.append", append, "pool requests counts")
      .def("raddle.page_pool.truncate", truncate, "pool requests kv_len")
      .def("raddle.page_pool.replace", replace, "pool request pages")
      .def("raddle.page_pool.finish", finish, "pool requests")
      .def("raddle.page_pool.kv_len", kv_len, "pool request")
      .def("raddle.page_pool.pages", pages, "pool request")
      .def("raddle.page_pool.tables", tables, "pool requests");
}

}  // namespace raddle::border
