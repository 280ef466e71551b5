// The radix cache.
#include "raddle/radix_cache.h"

#include "ffi/border.h"
#include "layout/normal_form.h"

namespace raddle::border {

namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

RadixCache& take_cache(Arguments& in) { return *in.object<RadixCacheObj>("cache").value; }

std::string take_key(Arguments& in) {
  const ffi::AnyView value = in.take("extra_key");
  const auto key = value.as<ffi::Bytes>();
  if (!key) fail<TypeError>("extra_key is ", kind_of(value), "; expected bytes");
  return {key->data(), key->size()};
}

ffi::ObjectRef make(Arguments& in) {
  const ffi::AnyView pool = in.take("pool");
  const auto* given = pool.as<PagePoolObj>();
  if (!given || !given->value)
    fail<TypeError>("pool is ", kind_of(pool), "; expected a raddle.PagePool");
  auto cache = ffi::make_object<RadixCacheObj>();
  cache->value = std::make_unique<RadixCache>(given->value, in.integer32("token_bits", 32));
  cache->pool = pool.cast<ffi::ObjectRef>();
  return ffi::ObjectRef(std::move(cache));
}

ffi::ObjectRef pool(Arguments& in) { return in.object<RadixCacheObj>("cache").pool; }

Fields match(Arguments& in) {
  RadixCache& cache = take_cache(in);
  const IndexRef tokens = in.index("tokens");
  const std::string key = take_key(in);
  const bool lock = in.boolean("lock");
  const bool touch = in.boolean("touch");
  using Use = RadixCache::Use;
  CacheMatch found = cache.match(tokens, key, lock ? Use::lock : touch ? Use::touch : Use::none);
  return {{"num_tokens", found.num_tokens},
          {"pages", array_of(std::move(found.pages))},
          {"node", found.node}};
}

Fields insert(Arguments& in) {
  RadixCache& cache = take_cache(in);
  const IndexRef tokens = in.index("tokens");
  const std::vector<i32> pages = copy_index("pages", in.index("pages"));
  const std::string key = take_key(in);
  CacheInsertion done = cache.insert(tokens, pages, key, in.boolean("lock"));
  return {{"num_tokens", done.num_tokens},
          {"num_cached", done.num_cached},
          {"pages", array_of(std::move(done.pages))},
          {"node", done.node}};
}

void lock(Arguments& in) {
  RadixCache& cache = take_cache(in);
  cache.lock(in.integer("node", untouched));
}

void unlock(Arguments& in) {
  RadixCache& cache = take_cache(in);
  cache.unlock(in.integer("node", untouched));
}

ffi::Tensor evict(Arguments& in) {
  RadixCache& cache = take_cache(in);
  return array_of(cache.evict(in.integer32("num_pages", -1)));
}

Fields counts(Arguments& in) {
  const CacheCounts counts = take_cache(in).counts();
  return {{"nodes", counts.nodes},
          {"tokens", counts.tokens},
          {"pages", counts.pages},
          {"locked_pages", counts.locked_pages},
          {"memory_bytes", counts.memory_bytes}};
}

ffi::Tensor nodes(Arguments& in) { return array_of(take_cache(in).nodes()); }

Fields entry(Arguments& in) {
  const RadixCache& cache = take_cache(in);
  CacheEntry entry = cache.entry(in.integer("node", untouched));
  return {{"node", entry.node},
          {"parent", entry.parent},
          {"extra_key", ffi::Bytes(entry.key)},
          {"tokens", array_of(std::move(entry.tokens))},
          {"pages", array_of(std::move(entry.pages))},
          {"locks", entry.locks}};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::ObjectDef<RadixCacheObj>();
  Exports()
      .def("raddle.radix_cache", make, "pool token_bits")
      .def("raddle.radix_cache.pool", pool, "cache")
      .def("raddle.radix_cache.match", match, "cache tokens extra_key lock touch")
      .def("raddle.radix_cache.insert", insert, "cache tokens pages extra_key lock")
      .def("raddle.radix_cache.lock", lock, "cache node")
      .def("raddle.radix_cache.unlock", unlock, "cache node")
      .def("raddle.radix_cache.evict", evict, "cache num_pages")
      .def("raddle.radix_cache.counts", counts, "cache")
      .def("raddle.radix_cache.nodes", nodes, "cache")
      .def("raddle.radix_cache.entry", entry, "cache node");
}

}  // namespace raddle::border
