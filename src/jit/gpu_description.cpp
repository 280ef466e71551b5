#include "jit/gpu_description.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>

#include "jit/cubin.h"
#include "jit/made_once.h"
#include "jit/nvrtc.h"
#include "raddle/error.h"

namespace raddle::jit {
namespace {

/// First bytes of the table, by which a search finds it in a cubin.
constexpr i32 magic[] = {0x64646172, 0x6d5f656c, 0x65626d65, 0x5f3f7372};

/// In the table's order; one Entry per member follows.
struct Header {
  i32 magic[4];
  i32 bytes, scan;
  i32 query, key, value, logits, mask, sink, output, padding;
};

struct Entry {
  i32 kind, rank, hull, bytes;
  i64 offset;  ///< what a pointer to a member holds: NVRTC has no offsetof
};

std::string source_of(const VariantSource& source) {
  std::ostringstream text, types, values;
  const std::string v = "raddle::user::" + source.name;
  for (std::size_t i = 0; i < source.params.size(); ++i) {
    const std::string member = v + "::" + source.params[i].name;
    const std::string type = "raddle::member_type<decltype(" + member + ")>::value";
    types << "  int kind" << i << ", rank" << i << ", hull" << i << ", bytes" << i
          << ";\n  decltype(" << member << ") " << v << "::* at" << i << ";\n";
    values << ",\n  static_cast<int>(" << type << ".kind), " << type << ".rank, " << type
           << ".hull, " << type << ".bytes, &" << member;
  }
  text << "#define RADDLE_ISA gpu\n#include \"raddle/engine/variant/parts.h\"\n" << declare(source);
  text << "struct RaddleDescription {\n  int header[" << sizeof(Header) / sizeof(i32) << "];\n"
       << types.str() << "};\nextern \"C\" __device__ RaddleDescription raddle_description = {{";
  for (const i32 word : magic) text << word << ", ";
  text << "sizeof(" << v << "), static_cast<int>(raddle::scan_of<" << v << ">()), ";
  for (const char* part : {"query", "key", "value", "logits", "mask", "sink", "output"})
    text << "raddle::has_" << part << "<" << v << ">, ";
  text << "0}" << values.str() << "};\n";
  return amalgamate(text.str());
}

/// A description with everything that it points to.
struct Description {
  VariantSource source;
  std::vector<Member> members;
  VariantOps ops{};

  void read(const std::string& cubin);
};

void Description::read(const std::string& cubin) {
  const std::string begin(reinterpret_cast<const char*>(magic), sizeof(magic));
  const std::size_t at = cubin.find(begin);
  Header header{};
  std::vector<Entry> table(source.params.size());
  const std::size_t table_bytes = table.size() * sizeof(Entry);
  if (at == std::string::npos || at + sizeof(header) + table_bytes > cubin.size())
    fail<CompileError>("variant '", source.name, "': NVRTC's output lacks what was asked for");
  std::memcpy(&header, cubin.data() + at, sizeof(header));
  if (table_bytes > 0) std::memcpy(table.data(), cubin.data() + at + sizeof(header), table_bytes);

  const std::vector<std::string> planned = plan_members(source);
  for (std::size_t i = 0; i < source.params.size(); ++i) {
    const VariantParam& param = source.params[i];
    const Entry& entry = table[i];
    const MemberType type{static_cast<MemberKind>(entry.kind), entry.rank, entry.hull != 0,
                          entry.bytes};
    bool plan = false;
    for (const std::string& name : planned) plan = plan || name == param.name;
    members.push_back(Member{param.name.c_str(), type, plan ? MemberTime::plan : MemberTime::run,
                             static_cast<i32>(entry.offset), param.extents, Check::any});
  }
  ops.name = ops.type = source.name.c_str();
  ops.members = members.data();
  ops.num_members = static_cast<i32>(members.size());
  ops.bytes = header.bytes;
  ops.scan = static_cast<Scan>(header.scan);
  // Present, but only on the GPU.
  if (header.query) ops.query = [](const void*, float*, i32, const Row&) { std::abort(); };
  if (header.key) ops.key = [](const void*, float*, i32, const Key&) { std::abort(); };
  if (header.value) ops.value = [](const void*, float*, i32, const Key&) { std::abort(); };
  if (header.logits)
    ops.logits = [](const void*, const LogitRows&, const KeyLanes&) { std::abort(); };
  if (header.mask)
    ops.mask = [](const void*, u8*, i32, const Row&, const KeyLanes&) { std::abort(); };
  if (header.sink) ops.sink = [](const void*, const Row&) -> float { std::abort(); };
  if (header.output) ops.output = [](const void*, float*, i32, const Row&, float) { std::abort(); };
}

}  // namespace

const VariantOps& describe_on_gpu(const VariantSource& source, const std::string& arch) {
  static MadeOnce<Description>& all = *new MadeOnce<Description>;
  const Description& found = all.get(declare(source), [&] {
    auto description = std::make_unique<Description>();
    description->source = source;
    // Only a cubin has the table's bytes as they are.
    const std::string real = "sm_" + arch.substr(arch.find('_') + 1);
    description->read(find_or_compile_cubin(source.name + " (members)", source_of(source), real));
    return description.release();
  });
  check_members(source, found.ops);
  return found.ops;
}

}  // namespace raddle::jit
