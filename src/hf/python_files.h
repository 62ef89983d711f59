#pragma once
// The Python files that an exported folder carries, from src/hf/transformers (src/hf/hf.cmake).

namespace sluice {

struct PythonFile {
  const char *name, *text;
};
extern const PythonFile kPythonFiles[2];

}  // namespace sluice
