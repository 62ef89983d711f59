// Limits of memory and processor time, read from control groups in a folder that imitates /proc and /sys.
#include "core/limits.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "core/cgroup.h"
#include "core/cores.h"
#include "core/utf8.h"
#include "support/temp_folder.h"

namespace sluice {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Tree {
  TempFolder folder;
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = folder / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
};

/// A hierarchy of version 2 in which the process is in /job/step.
void version_2(const Tree& t) {
  t.write("proc/self/cgroup", "0::/job/step\n");
  t.write("proc/self/mountinfo",
          "25 30 0:22 / /proc rw - proc proc rw\n35 25 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 "
          "cgroup2 rw,nsdelegate\n");
  t.write("sys/fs/cgroup/job/step/memory.max", "max\n");
  t.write("sys/fs/cgroup/job/memory.max", std::to_string(400 * kMiB) + "\n");
  t.write("sys/fs/cgroup/job/memory.current", std::to_string(300 * kMiB) + "\n");
  t.write("sys/fs/cgroup/job/memory.stat", "anon 1\nfile 2\ninactive_file " + std::to_string(150 * kMiB) +
                                               "\nactive_file " + std::to_string(40 * kMiB) +
                                               "\nslab_reclaimable " + std::to_string(10 * kMiB) + "\n");
}

}  // namespace

TEST_CASE("limits of all ancestor control groups apply; file cache does not count", "[limits]") {
  const Tree t;
  version_2(t);
  t.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 2097152 kB\n");
  const std::vector<MemoryGroup> groups = memory_groups(t.folder.path);
  REQUIRE(groups.size() == 1);
  CHECK(groups[0].file == t.folder / "sys/fs/cgroup/job/memory.max");
  CHECK(groups[0].free() == 300 * kMiB);
  CHECK_FALSE(groups[0].own);

  t.write("sys/fs/cgroup/job/step/memory.max", std::to_string(100 * kMiB) + "\n");
  t.write("sys/fs/cgroup/job/step/memory.current", std::to_string(120 * kMiB) + "\n");
  const std::vector<MemoryLimit> limits = memory_limits(t.folder.path);
  REQUIRE(limits.size() >= 3);
  CHECK(limits[0].free == 2048 * kMiB);
  CHECK(limits[1].free == 0);  // more is used than is allowed
  CHECK(limits[1].own_group);
  CHECK_THAT(limits[1].name, Catch::Contains("100.0 MiB") && Catch::Contains("step/memory.max"));
  CHECK(limits[2].free == 300 * kMiB);
}

TEST_CASE("control groups of version 1, and of a container that sees only its own group", "[limits]") {
  const Tree t;
  t.write("proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n");
  t.write("proc/self/mountinfo",
          "40 30 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
          "41 30 0:32 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n");
  t.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  t.write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(200 * kMiB) + "\n");
  CHECK(memory_groups(t.folder.path).empty());  // none is set
  t.write("sys/fs/cgroup/memory/memory.stat", "hierarchical_memory_limit " + std::to_string(256 * kMiB) +
                                                  "\ntotal_inactive_file " + std::to_string(50 * kMiB) +
                                                  "\ntotal_active_file 0\n");
  REQUIRE(memory_groups(t.folder.path).size() == 1);  // of an ancestor, which is invisible
  CHECK(memory_groups(t.folder.path)[0].free() == 106 * kMiB);
  t.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  t.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  CHECK_FALSE(cpu_quota(t.folder.path));
  t.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000\n");
  CHECK(cpu_quota(t.folder.path).value() == 1.5);
  CHECK(memory_groups(t.folder / "nowhere").empty());
}

TEST_CASE("threads: the cores of mask and quota, divided among the ranks of a machine", "[limits]") {
  const Tree t;
  version_2(t);
  t.write("sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  CHECK_FALSE(cpu_quota(t.folder.path));
  t.write("sys/fs/cgroup/job/cpu.max", "250000 100000\n");
  CHECK(cpu_quota(t.folder.path).value() == 2.5);

  Cores cores{.allowed = 8, .quota = std::nullopt};
  CHECK(default_threads(cores) == 8);
  CHECK(default_threads(cores, 4, 4) == 2);  // four ranks, none bound
  CHECK(default_threads(cores, 1, 4) == 8);  // each bound to eight separate cores
  CHECK(default_threads(cores, 16, 16) == 1);
  cores.quota = 2.5;
  CHECK(default_threads(cores) == 2);
  CHECK(default_threads(cores, 1, 2) == 1);
  cores.quota = 0.5;
  CHECK(default_threads(cores) == 1);

  cores = {.allowed = 2, .quota = std::nullopt};
  CHECK(too_many_threads(cores, 2).empty());
  CHECK_THAT(too_many_threads(cores, 3), Catch::Contains("3 threads share 2 cores"));
  CHECK(too_many_threads(cores, 1, 2, 2).empty());
  CHECK_THAT(too_many_threads(cores, 2, 2, 2),
             Catch::Contains("2 ranks of this machine with 2 threads each share 2 cores"));
  CHECK(too_many_threads({.allowed = 1, .quota = std::nullopt}, 1).empty());
  cores.quota = 1.0;
  CHECK_THAT(too_many_threads(cores, 2), Catch::Contains("quota of 1.00 cores"));
  CHECK(cores_of_process().allowed >= 1);
}

TEST_CASE("the first byte that is not UTF-8 is found", "[limits]") {
  constexpr size_t none = std::string_view::npos;
  for (const char* good : {"", "abc", "h\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xef\xbb\xbf"})
    CHECK(find_invalid_utf8(good) == none);
  for (const char* bad :
       {"\xff", "\x80", "\xc0\xaf", "\xc3", "\xe2\x82", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe0\x80\x80"})
    CHECK(find_invalid_utf8(bad) == 0);
  CHECK(find_invalid_utf8("ok \xc3( no") == 3);
}

}  // namespace sluice
