# Writes a C++ file that holds the engine's headers as text: what is compiled just in time must not
# depend on where, or whether, headers are installed.
#   cmake -DROOT=include -DOUT=file.cpp -P embed_headers.cmake
file(GLOB_RECURSE headers RELATIVE ${ROOT} ${ROOT}/raddle/engine/*.h)
list(SORT headers)
set(text "#include \"jit/headers.h\"\n\nnamespace raddle::jit {\n\n")
string(APPEND text "const std::vector<Header>& engine_headers() {\n")
string(APPEND text "  static const std::vector<Header> headers = {\n")
foreach(header IN LISTS headers)
  file(READ ${ROOT}/${header} content)
  string(APPEND text "      {\"${header}\", R\"~~~~(${content})~~~~\"},\n")
endforeach()
string(APPEND text "  };\n  return headers;\n}\n\n}  // namespace raddle::jit\n")
file(WRITE ${OUT} "${text}")
