#pragma once
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/token_file.h"
#include "support/temp_folder.h"

namespace sluice::test {

using TemporaryFolder = ::sluice::TempFolder;

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// Runs body, which must throw an Error of that kind whose message contains every part.
template <class Body>
void expect_error(ExitCode code, std::vector<std::string> parts, Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(error.code() == code);
    for (const std::string& part : parts) CHECK_THAT(error.what(), Catch::Contains(part));
    return;
  }
  FAIL_CHECK("nothing was thrown; expected: " << (parts.empty() ? std::string("an error") : parts[0]));
}

/// Writes a token file of the given documents.
inline void write_tokens(const std::string& prefix, const std::vector<std::vector<int32_t>>& documents,
                         int64_t vocab_size) {
  TokenFileWriter writer(prefix, vocab_size);
  for (const auto& document : documents)
    writer.add_document(document.data(), static_cast<int64_t>(document.size()));
  writer.finish();
}

}  // namespace sluice::test
