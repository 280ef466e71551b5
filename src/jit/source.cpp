#include "jit/source.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "jit/headers.h"
#include "raddle/error.h"

namespace raddle::jit {
namespace {

std::string_view find_header(std::string_view path) {
  const auto& headers = engine_headers();
  const auto at = std::lower_bound(headers.begin(), headers.end(), path,
                                   [](const Header& h, std::string_view p) { return h.path < p; });
  if (at == headers.end() || at->path != path)
    fail<ValueError>("source includes \"", path, "\"; the engine has no such header");
  return at->text;
}

constexpr std::string_view include_prefix = "#include \"raddle/";

/// The preprocessor may leave out headers under an #if, so their next mention must write them
/// again: each is guarded by a macro. `seen` holds the headers that were written outside any #if.
struct Inliner {
  std::string out;
  std::set<std::string_view> seen;

  void inline_header(std::string_view path, bool conditional) {
    const std::string_view text = find_header(path);
    // Views of the embedded headers' own paths live as long as the program.
    if (seen.contains(text)) return;
    if (!conditional) seen.insert(text);
    std::string guard = "RADDLE_ONCE_";
    for (const char c : path) guard += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
    out += "#if !defined(" + guard + ")\n#define " + guard + "\n";
    inline_text(text, path, conditional);
    out += "#endif\n";
  }

  void inline_text(std::string_view text, std::string_view name, bool conditional) {
    int line_number = 0, depth = 0;
    bool resume = true;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size() - 1);
      const std::string_view line = text.substr(0, end + 1);
      text.remove_prefix(end + 1);
      ++line_number;
      depth += line.starts_with("#if") ? 1 : line.starts_with("#endif") ? -1 : 0;
      if (line.starts_with("#pragma once")) continue;
      if (line.starts_with(include_prefix)) {
        const std::size_t open = line.find('"') + 1;
        inline_header(line.substr(open, line.find('"', open) - open), conditional || depth > 0);
        resume = true;
        continue;
      }
      if (resume && !name.empty())
        out += "#line " + std::to_string(line_number) + " \"" + std::string(name) + "\"\n";
      resume = false;
      out += line;
    }
  }
};

// --- which members a mask reads ------------------------------------------------------------------

bool starts_word(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_'; }
bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// Words and single punctuation characters of C++ source; comments and strings left out.
std::vector<std::string> tokens(const std::string& text) {
  std::vector<std::string> found;
  for (std::size_t i = 0; i < text.size();) {
    if (text.compare(i, 2, "//") == 0) {
      i = std::min(text.find('\n', i), text.size());
    } else if (text.compare(i, 2, "/*") == 0) {
      const std::size_t end = text.find("*/", i + 2);
      i = end == std::string::npos ? text.size() : end + 2;
    } else if (text[i] == '"' || text[i] == '\'') {
      const char quote = text[i++];
      while (i < text.size() && text[i] != quote) i += text[i] == '\\' ? 2 : 1;
      ++i;
    } else if (starts_word(text[i])) {
      std::size_t end = i;
      while (end < text.size() && in_word(text[end])) ++end;
      found.push_back(text.substr(i, end - i));
      i = end;
    } else if (std::isdigit(static_cast<unsigned char>(text[i]))) {
      // 1'000'000 holds no character literal.
      while (i < text.size() && (in_word(text[i]) || text[i] == '.' || text[i] == '\'')) ++i;
    } else {
      if (!std::isspace(static_cast<unsigned char>(text[i]))) found.emplace_back(1, text[i]);
      ++i;
    }
  }
  return found;
}

/// Index after the bracket that closes the one at `at`.
std::size_t after_bracket(const std::vector<std::string>& t, std::size_t at) {
  const std::string& open = t[at];
  const std::string close = open == "(" ? ")" : "}";
  int depth = 0;
  for (; at < t.size(); ++at) {
    depth += t[at] == open ? 1 : t[at] == close ? -1 : 0;
    if (depth == 0) return at + 1;
  }
  return at;
}

/// The words in the bodies of all functions called `name`.
std::set<std::string> words_of(const std::vector<std::string>& t, const std::string& name) {
  std::set<std::string> words;
  for (std::size_t i = 0; i + 1 < t.size(); ++i) {
    if (t[i] != name || t[i + 1] != "(") continue;
    // Between the parameters and the body: const, noexcept(…), a requires clause, "-> bool".
    std::size_t at = after_bracket(t, i + 1);
    while (at < t.size() && t[at] != "{" && t[at] != ";" && t[at] != ")" && t[at] != "}")
      at = t[at] == "(" ? after_bracket(t, at) : at + 1;
    if (at >= t.size() || t[at] != "{") continue;  // a call, not a definition
    for (const std::size_t end = after_bracket(t, at); at < end; ++at) words.insert(t[at]);
  }
  return words;
}

const char* extent_name(Extent extent) {
  static constexpr const char* names[] = {"any", "qo_heads", "kv_heads", "half_head_dim",
                                          "one_or_requests"};
  return names[static_cast<i32>(extent)];
}

/// Splits the user's text into its includes and the rest. The rest is put into Raddle's namespace,
/// where no header belongs, so includes are moved before it; line numbers stay. A kernel is
/// identified by its text, which would only contain the name of a user's own header: those are
/// refused.
struct UserText {
  std::string includes, rest;

  explicit UserText(const VariantSource& source) {
    // Names in #line are quoted; a name is an identifier.
    rest = "#line 1 \"" + source.name + "\"\n";
    std::istringstream lines(source.text);
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      const std::size_t hash = line.find_first_not_of(" \t");
      const std::size_t word =
          hash == std::string::npos ? hash : line.find_first_not_of(" \t", hash + 1);
      const bool include =
          word != std::string::npos && line[hash] == '#' && line.compare(word, 7, "include") == 0;
      if (include && line.find('"', word) < line.find("\"raddle/", word))
        fail<ValueError>("text of '", source.name, "' has ", line.substr(hash),
                         "; expected headers of Raddle (\"raddle/engine/core/interval.h\") and "
                         "standard ones (<cstdint>): paste others into the text, since what is "
                         "compiled is found again by it");
      if (include)
        includes += (line.find("\"raddle/") == std::string::npos
                         ? "#line " + std::to_string(number) + " \"" + source.name + "\"\n"
                         : "") +
                    "#" + line.substr(word) + "\n";
      else
        rest += line;
      rest += '\n';
    }
  }
};

std::string mask_type(const std::vector<MaskNode>& masks) {
  std::vector<std::string> stack;
  for (const MaskNode& node : masks) {
    if (node.join == MaskNode::Join::leaf) {
      stack.push_back("Leaf<" + std::to_string(node.part) + ">");
      continue;
    }
    const std::string b = std::move(stack.back());
    stack.pop_back();
    stack.back() =
        (node.join == MaskNode::Join::all_of ? "AllOf<" : "AnyOf<") + stack.back() + ", " + b + ">";
  }
  return stack.empty() ? "NoMask" : stack.back();
}

/// A member that params does not name would have no value. The size of the struct reveals it.
void check_all_named(const VariantSource& source, const VariantOps& ops) {
  std::vector<const Member*> members;
  for (i32 i = 0; i < ops.num_members; ++i) members.push_back(&ops.members[i]);
  std::sort(members.begin(), members.end(),
            [](const Member* a, const Member* b) { return a->offset < b->offset; });
  i32 end = 0, widest = 1;
  bool named = true;
  for (const Member* member : members) {
    const i32 alignment = member->type.rank > 0 ? static_cast<i32>(alignof(void*)) : 4;
    widest = std::max(widest, alignment);
    named = named && member->offset == round_up(end, alignment);
    end = member->offset + member->type.bytes;
  }
  if (named && ops.bytes == std::max(round_up(end, widest), 1)) return;
  fail<ValueError>("params: struct ", source.name,
                   " has members that params does not name (it takes ", ops.bytes,
                   " bytes); expected all of them, with values from Python: make "
                   "constants static constexpr");
}

}  // namespace

const char* type_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float";
    case DType::float16:
      return "f16";
    case DType::bfloat16:
      return "bf16";
    case DType::float8_e4m3fn:
      return "e4m3";
    case DType::float8_e5m2:
      return "e5m2";
    case DType::int8:
      return "s8";
  }
  return "";
}

std::string qualified_type_of(DType dtype) {
  return dtype == DType::float32 ? type_of(dtype) : std::string("raddle::") + type_of(dtype);
}

std::string describe(const MemberType& type) {
  static constexpr const char* names[] = {"a number",        "an integer",
                                          "a float32 array", "an int32 array",
                                          "a uint32 array",  "a uint8 or bool array"};
  std::string text = names[static_cast<i32>(type.kind)];
  if (type.rank > 0) text += " of rank " + std::to_string(type.rank);
  return text;
}

void check_members(const VariantSource& source, const VariantOps& ops) {
  for (i32 i = 0; i < ops.num_members; ++i) {
    const MemberType& said = source.params[static_cast<std::size_t>(i)].type;
    const MemberType& is = ops.members[i].type;
    if (said.kind != is.kind || said.rank != is.rank)
      fail<TypeError>("params: '", ops.members[i].name, "' is said to be ", describe(said),
                      "; expected ", describe(is), ", as the member of struct ", source.name,
                      " is");
  }
  check_all_named(source, ops);
}

std::string amalgamate(const std::string& text) {
  Inliner inliner;
  inliner.inline_text(text, "", false);
  return std::move(inliner.out);
}

std::vector<std::string> plan_members(const VariantSource& source) {
  const std::vector<std::string> t = tokens(source.text);
  std::set<std::string> reached = {"mask", "kv_span", "row_span", "knows_spans", "coverage"};
  std::vector<std::string> open(reached.begin(), reached.end());
  // It is hard to tell where a macro is used, so what it mentions counts as mentioned by the mask.
  for (std::size_t at = 0; (at = source.text.find("#define", at)) != std::string::npos;) {
    const std::size_t end = std::min(source.text.find('\n', at), source.text.size());
    for (const std::string& word : tokens(source.text.substr(at, end - at))) open.push_back(word);
    at = end;
  }
  reached.insert(open.begin(), open.end());
  while (!open.empty()) {
    const std::string name = std::move(open.back());
    open.pop_back();
    for (const std::string& word : words_of(t, name))
      if (reached.insert(word).second) open.push_back(word);
  }
  std::vector<std::string> members;
  for (const VariantParam& param : source.params)
    if (reached.contains(param.name)) members.push_back(param.name);
  return members;
}

std::string declare(const VariantSource& source) {
  std::ostringstream out;
  const UserText user(source);
  const std::string type = "user::" + source.name;
  // A namespace of its own: the struct may have the name of something in the engine.
  out << "#include \"raddle/engine/variant/parts.h\"\n#include "
         "\"raddle/engine/variant/traced.h\"\n"
      << user.includes << "RADDLE_ENGINE_BEGIN\nnamespace user {\n"
      << user.rest << "#line 1 \"" << source.name << " (members)\"\n}\n";
  out << "template struct FollowsContract<" << type << ">;\n";
  const std::vector<std::string> planned = plan_members(source);
  if (source.params.empty()) {
    out << "RADDLE_VARIANT_PLAIN(" << type << ", \"" << source.name << "\");\n";
  } else {
    out << "RADDLE_VARIANT(" << type << ", \"" << source.name << '"';
    for (const VariantParam& param : source.params) {
      const bool plan = std::find(planned.begin(), planned.end(), param.name) != planned.end();
      out << ",\n  " << (plan ? "RADDLE_PLAN_TENSOR(" : "RADDLE_RUN_TENSOR(") << type << ", "
          << param.name;
      for (i32 i = 0; i < std::max(param.type.rank, 1); ++i)
        out << ", " << extent_name(param.extents.of[i]);
      out << ')';
    }
    out << ");\n";
  }
  out << "RADDLE_ENGINE_END\n";
  return out.str();
}

std::string declare(const CompositionSource& composition, const std::string& name) {
  std::string text =
      "#include \"raddle/engine/variant/composition.h\"\n"
      "#include \"raddle/engine/variant/traced.h\"\n";
  std::string types;
  for (std::size_t i = 0; i < composition.parts.size(); ++i) {
    const Functor& part = composition.parts[i];
    if (!part.source) {
      text += "#include \"raddle/engine/variant/" + part.name + ".h\"\n";
      types += ", " + part.type;
      continue;
    }
    // Two parts may have one name, such as two functions called mask_mod.
    const std::string space = "part" + std::to_string(i);
    const UserText user(*part.source);
    text += user.includes + "RADDLE_ENGINE_BEGIN\nnamespace " + space + " {\n" + user.rest +
            "}\nRADDLE_ENGINE_END\n";
    types += ", " + space + "::" + part.type;
  }
  return text + "RADDLE_ENGINE_BEGIN\nusing " + name + " = Composition<" +
         mask_type(composition.masks) + types + ">;\nRADDLE_ENGINE_END\n";
}

std::string declare_variant(const CompositionSource& composition, i32 bytes) {
  std::string text = declare(composition, "Variant");
  if (bytes > 0)
    text += "static_assert(sizeof(raddle::Variant) == " + std::to_string(bytes) + ");\n";
  return text;
}

}  // namespace raddle::jit
