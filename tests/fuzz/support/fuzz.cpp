#include "support/fuzz.h"

#include <spdlog/spdlog.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/utf8.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

/// Messages for a terminal would slow everything down.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spdlog::set_level(spdlog::level::off);
  sluice::fuzz::folder();
  return 0;
}

namespace sluice::fuzz {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kMostMessage = size_t{1} << 20;

void check_message(std::string_view message) {
  expect(message.size() <= kMostMessage, fmt::format("a message of {} bytes", message.size()));
  const auto is_control = [](char c) {
    const auto u = static_cast<unsigned char>(c);
    return (u < 0x20 && c != '\n') || u == 0x7f;
  };
  const auto bad = std::find_if(message.begin(), message.end(), is_control);
  if (bad != message.end())
    finding(fmt::format("byte {} of the message is the control character 0x{:02x}: {}", bad - message.begin(),
                        static_cast<unsigned>(*bad), message));
  if (const size_t at = find_invalid_utf8(message); at != std::string_view::npos)
    finding(fmt::format("byte {} of the message is not UTF-8: {}", at, message));
}

/// [A-Za-z0-9._-], one folder at most, no part that begins with a dot.
bool is_safe_name(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-' || c == '/';
  };
  return !name.empty() && name.size() <= 80 && std::all_of(name.begin(), name.end(), plain) &&
         name[0] != '.' && name[0] != '/' && name.back() != '/' &&
         name.find("/.") == std::string_view::npos && name.find("//") == std::string_view::npos &&
         std::count(name.begin(), name.end(), '/') <= 1;
}

void collect(Json& node, std::vector<Json*>& all) {
  all.push_back(&node);
  if (node.is_structured())
    for (auto& child : node) collect(child, all);
}

Json critical_value(Random& random) {
  static const Json values[] = {nullptr,
                                true,
                                false,
                                0,
                                1,
                                -1,
                                2,
                                3,
                                7,
                                8,
                                255,
                                65536,
                                2147483647,
                                2147483648,
                                std::numeric_limits<int64_t>::max(),
                                std::numeric_limits<int64_t>::min(),
                                uint64_t{1} << 63,
                                std::numeric_limits<uint64_t>::max(),
                                int64_t{1} << 62,
                                int64_t{1} << 53,
                                0.5,
                                -0.0,
                                1.5,
                                1e-320,
                                1e300,
                                1e308,
                                -1e308,
                                9.3e18,
                                "",
                                "*",
                                ".",
                                "..",
                                "/etc/passwd",
                                "null",
                                "\x1b[31m",
                                "\xc3\xa9",
                                Json::array(),
                                Json::object(),
                                Json::array({Json::array()}),
                                Json::array({1, 2})};
  return random.of(values);
}

/// One change of a tree.
void change(Json& root, Random& random) {
  std::vector<Json*> all;
  collect(root, all);
  Json& node = *random.of(all);
  switch (random.below(8)) {
    case 0:
      node = critical_value(random);
      return;
    case 1:
      node = Json(*random.of(all));  // a copy: the tree may contain it
      return;
    case 2: {
      Json other = *random.of(all);
      if (node.is_array()) node.push_back(std::move(other));
      return;
    }
    case 3:
      if (node.is_structured() && !node.empty())
        node.erase(std::next(node.begin(), random.below(static_cast<uint32_t>(node.size()))));
      return;
    case 4:
      if (node.is_string()) {
        std::string text = mutated(node.get<std::string>(), 200);
        if (const size_t bad = find_invalid_utf8(text); bad != std::string::npos) text.resize(bad);
        node = text;
      }
      return;
    case 5:
      if (node.is_number_integer()) {
        const auto value = node.get<uint64_t>();
        const uint64_t changes[] = {value + 1, value - 1,  value * 2,
                                    value / 2, ~value + 1, value + (1u << 31)};
        node = static_cast<int64_t>(random.of(changes));
      }
      return;
    case 6:
      if (node.is_object()) {
        static const char* const names[] = {"", "step", "*", "name", "\x7f", "a.b"};
        node[random.of(names)] = Json(*random.of(all));
      }
      return;
    default:
      if (node.is_array() && node.size() > 1) std::swap(random.of(node), random.of(node));
      return;
  }
}

}  // namespace

void finding(const std::string& what) {
  std::fprintf(stderr, "FINDING: %s\n", what.c_str());
  std::abort();
}

bool attempt(const std::function<void()>& body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    if (error.code() == ExitCode::internal) finding(fmt::format("a contract was violated: {}", error.what()));
    check_message(error.what());
    return false;
  } catch (const std::exception& error) {
    finding(fmt::format("an exception that no caller expects: {}", error.what()));
  }
}

void must(const std::string& what, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    finding(fmt::format("{}: {}", what, error.what()));
  }
}

const std::string& folder() {
  // Never destroyed: the folder is removed after static objects are.
  static const std::string& path = *new std::string([] {
    std::string made = (fs::temp_directory_path() / "sluice_fuzz_XXXXXX").string();
    if (!mkdtemp(made.data())) finding("no temporary folder can be made");
    fs::current_path(made);
    std::atexit([] {
      std::error_code ignored;
      fs::current_path("/", ignored);
      fs::remove_all(folder(), ignored);
    });
    return made;
  }());
  return path;
}

void write(const std::string& name, std::string_view content) {
  const fs::path path = fs::path(folder()) / name;
  std::error_code error;
  if (name.find('/') != std::string::npos) fs::create_directories(path.parent_path(), error);
  // A name can be that of a folder of another file.
  std::ofstream(path, std::ios::binary) << content;
}

std::string read(const std::string& name) {
  std::ifstream file(fs::path(folder()) / name, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void clear() {
  for (const auto& entry : fs::directory_iterator(folder())) fs::remove_all(entry.path());
}

Files split(std::string_view archive) {
  constexpr std::string_view kMark = "=== ";
  Files files;
  files.emplace_back("", "");
  bool skipped = false, first = true;
  while (!archive.empty() || first) {
    const size_t end = archive.find('\n');
    const std::string_view line = archive.substr(0, end);
    archive.remove_prefix(end == std::string_view::npos ? archive.size() : end + 1);
    if (line.starts_with(kMark)) {
      const std::string_view name = line.substr(kMark.size());
      skipped = !is_safe_name(name);
      if (!skipped) files.emplace_back(name, "");
      first = true;
      continue;
    }
    if (!skipped) {
      if (!first) files.back().second += '\n';
      files.back().second += line;
    }
    first = false;
  }
  return files;
}

std::string join(const Files& files) {
  std::string archive;
  for (const auto& [name, content] : files) {
    if (!name.empty()) archive += (archive.empty() ? "=== " : "\n=== ") + name + "\n";
    archive += content;
  }
  return archive;
}

uint32_t Random::below(uint32_t n) {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  return n == 0 ? 0 : static_cast<uint32_t>(state_ >> 33) % n;
}

std::string mutated(const std::string& text, size_t most) {
  std::string out = text.substr(0, most);
  const size_t size = out.size();
  out.resize(most);
  if (most == 0) return out;
  out.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(out.data()), size, most));
  return out;
}

std::string mutated_json(const std::string& text, size_t most, Random& random) {
  Json root = Json::parse(text, nullptr, false);
  if (root.is_discarded() || random.one_in(8)) return mutated(text, most);
  for (uint32_t n = 1 + random.below(3); n > 0; --n) change(root, random);
  std::string out = root.dump(-1, ' ', false, Json::error_handler_t::replace);
  return out.size() <= most ? out : mutated(text, most);
}

std::string mutated_archive(const std::string& archive, size_t most, Random& random) {
  if (random.one_in(10)) return mutated(archive, most);
  Files files = split(archive);
  auto& [name, content] = random.of(files);
  const size_t room = most - std::min(most, archive.size() - std::min(archive.size(), content.size()));
  switch (random.below(12)) {
    case 0: {
      const auto copy = random.of(files);
      files.push_back(copy);
      break;
    }
    case 1:
      if (files.size() > 1)
        files.erase(files.begin() + 1 + random.below(static_cast<uint32_t>(files.size()) - 1));
      break;
    case 2:
      std::swap(content, random.of(files).second);
      break;
    default:
      content = content.starts_with('{') || content.starts_with('[') ? mutated_json(content, room, random)
                                                                     : mutated(content, room);
      break;
  }
  const std::string out = join(files);
  return out.size() <= most ? out : mutated(archive, most);
}

std::string mutated_lines(const std::string& archive, size_t most, Random& random) {
  if (random.one_in(4)) return mutated_archive(archive, most, random);
  Files files = split(archive);
  std::string& text = random.of(files).second;
  const size_t middle = random.below(static_cast<uint32_t>(text.size()) + 1);
  const size_t before = middle == 0 ? std::string::npos : text.rfind('\n', middle - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1,
               end = std::min(text.find('\n', begin), text.size());
  const std::string line = text.substr(begin, end - begin);
  switch (random.below(4)) {
    case 0:
      text.insert(begin, line + "\n");
      break;
    case 1:
      text.erase(middle, random.below(100));
      break;
    default:
      text.replace(begin, line.size(), mutated_json(line, 500, random));
      break;
  }
  const std::string out = join(files);
  return out.size() <= most ? out : archive.substr(0, most);
}

size_t put(const std::string& text, uint8_t* data, size_t most) {
  const size_t size = std::min(text.size(), most);
  if (size > 0) std::memcpy(data, text.data(), size);
  return size;
}

}  // namespace sluice::fuzz
