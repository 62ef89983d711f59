"""Bugs like those reported for other frameworks, each with the check that must catch it.

(name, file, exact old text, new text, target to build, check). A check is a test program with its filter, or `faults ...`.
"""

CHECKPOINT = 'test_checkpoint "[checkpoint],[sharded],[crash],[corruption]"'
RANKS = 'test_train "[ranks]"'
PROTOCOL = "faults --only disk --count 1"

MUTANTS = [
    ("LATEST in place", "src/checkpoint/store.cpp",
     'io::write_file_atomic(folder + "/LATEST", newest.substr(newest.rfind(\'/\') + 1) + "\\n");',
     'if (io::exists(folder + "/LATEST")) io::remove_file(folder + "/LATEST");\n'
     '      io::OutputFile latest(folder + "/LATEST", io::OutputFile::Mode::create_new);\n'
     '      latest.write(newest.substr(newest.rfind(\'/\') + 1) + "\\n");', "sluice", PROTOCOL),
    ("no sync of the folder", "src/checkpoint/write.cpp", "  io::fsync_directory(job.folder);\n}\n\n}  // namespace sluice",
     "}\n\n}  // namespace sluice", "sluice", PROTOCOL),
    ("no sync of files", "src/checkpoint/write.cpp", "    file_.fsync();\n    file_.close();", "    file_.close();", "sluice",
     PROTOCOL),
    ("old checkpoints go first", "src/checkpoint/store.cpp",
     "      Manifest manifest = collect_parts(*current, write_files(*current), patience);",
     "      rotate_checkpoints(folder, std::max<int64_t>(config.keep_last - 1, 1), 0, \"\", valid);\n"
     "      Manifest manifest = collect_parts(*current, write_files(*current), patience);", "sluice", PROTOCOL),
    ("checksums are not compared", "src/checkpoint/manifest.cpp",
     "  if (checksum(file.data(), file.size()) == record.xxh3_128) return file;", "  return file;", "sluice",
     "faults --only damage --count 40"),
    ("the manifest leaves a file out", "src/checkpoint/write.cpp",
     '  write_text(job, "config.yaml", job.config_yaml, manifest);',
     '  Manifest forgotten;\n  write_text(job, "config.yaml", job.config_yaml, forgotten);', "test_checkpoint", CHECKPOINT),
    ("snapshot of live weights", "src/checkpoint/write.cpp", "    if (memory && item.bytes())", "    if (memory && item.bytes() < 0)",
     "test_checkpoint", CHECKPOINT),
    ("step of a later save", "src/checkpoint/write.cpp", "  manifest.step = job.step;", "  manifest.step = job.step + 1;",
     "test_checkpoint", CHECKPOINT),
    ("rank 0's samples on all ranks", "src/train/trainer.cpp",
     "first_sample(config_, step, ranks_->rank() * micro_batches_ + i)", "first_sample(config_, step, i)", "test_train", RANKS),
    ("position times ranks", "src/train/trainer.cpp", "first_sample(config_, step, ranks_->rank()",
     "first_sample(config_, step * ranks_->size(), ranks_->rank()", "test_train", RANKS),
    ("the epoch is not in the order's key", "src/data/loader.cpp", ".bits(static_cast<uint64_t>(epoch));", ".bits(0);",
     "test_data", 'test_data "[loader]"'),
    ("epochs begin where the last one stopped", "src/data/loader.cpp", "static_cast<uint64_t>(index % source.num_samples())",
     "static_cast<uint64_t>((index + epoch / 2) % (source.num_samples() - 1))", "test_data", 'test_data "[loader]"'),
    ("the policy is not saved", "src/train/trainer_state.cpp", '{"policy", policy_.state()}', '{"policy", StepPolicy(config_.train, 0).state()}',
     "test_train", 'test_train "[trainer],[ranks]"'),
    ("Adam's count is off by one", "src/train/trainer_state.cpp", 'state.integer("adam_steps", 0, step_)',
     'state.integer("adam_steps", 0, step_) + 1', "test_train", 'test_train "[trainer]"'),
    ("master weights are recreated", "src/train/trainer_state.cpp",
     'if (const Tensor master = optimizer_.master(id)) tensors.push_back({name + ".master", master});', "", "test_train",
     'test_train "[trainer]"'),
    ("each rank judges its own loss", "src/train/trainer.cpp",
     "  ranks_->all_gather(losses, mine, losses_here() * static_cast<int64_t>(sizeof(double)));",
     "", "test_train", RANKS),
    ("rank 0 evaluates without the others' weights", "src/run/run.cpp", "  trainer_->settle_weights();\n", "",
     "test_tools", 'test_tools "rank 0 evaluates*"'),
    ("values that are not finite enter the window", "src/train/step_policy.cpp", "  if (j.finite) {", "  if (true) {", "test_train",
     'test_train "[spike],[trainer]"'),
    ("values that are not finite are saved", "src/checkpoint/write.cpp", "    if (item.nonfinite >= 0)", "    if (item.nonfinite > 1 << 30)",
     "test_checkpoint", CHECKPOINT),
    ("token offsets of 32 bits", "src/data/token_file.cpp", "bin_.data() + begin * item_size_;",
     "bin_.data() + static_cast<uint32_t>(begin * item_size_);", "test_data", 'test_data "[token_file]"'),
    ("file names of a manifest are believed", "src/checkpoint/manifest.cpp", "    if (!is_plain_name(name) || name == kManifestName)",
     "    if (name == kManifestName)", "test_checkpoint", CHECKPOINT),
    ("a bad checkpoint is a fresh start", "src/checkpoint/verify.cpp", "  if (!first.empty())\n    fail(", "  if (false)\n    fail(",
     "sluice", "faults --only damage --count 36"),
    ("a signal to another rank is not heard", "src/run/run.cpp", "signals_.requested() ? 1.0 : 0.0",
     "leads() && signals_.requested() ? 1.0 : 0.0", "sluice", "faults --only signals --count 12"),
    ("sums in the order of ranks", "src/core/tree_sum.cpp", "  while (2 * half < count) half *= 2;",
     "  half = count - 1;", "test_train", RANKS),
    ("no watchdog while saving", "src/run/watchdog.cpp",
     'h.limit = h.phase == "evaluate" || h.phase == "save" ? kLongPhases * seconds_ : seconds_;',
     'h.limit = h.phase == "save" ? 1e9 : h.phase == "evaluate" ? kLongPhases * seconds_ : seconds_;', "sluice",
     "faults --only hangs --count 4"),
    # Of this program's own making.
    ("orphans when the launcher dies", "src/comm/mpi.cpp", "  prctl(PR_SET_PDEATHSIG, SIGKILL);", "  (void)SIGKILL;", "sluice",
     "faults --only deaths --count 6 --slack 3"),
    ("a dead neighbour is not missed", "src/run/watchdog.cpp", "    if (const std::string why = who_died(me); !why.empty()) end(why, {});",
     "", "sluice", "faults --only deaths --count 12"),
]
