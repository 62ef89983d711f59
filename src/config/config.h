#pragma once
// The configuration, with the same sections as the YAML, one header each. Each key is one member, whose
// initialiser is the default, and one fields() line with its name and help text. Reading, writing, comparing
// and documenting the configuration are visitors (fields.h). Immutable after load_config().
#include <string>

#include "config/data.h"
#include "config/eval.h"
#include "config/model.h"
#include "config/optimizer.h"
#include "config/parallel.h"
#include "config/run.h"
#include "config/train.h"

namespace sluice {

struct Config {
  std::string name;
  std::string run_dir;
  ModelConfig model;
  LoraConfig lora;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  EvalConfig eval;
  AnalysisConfig analysis;
  CheckpointConfig checkpoint;
  LogConfig log;

  template <class V>
  void fields(V& f) {
    f("name", name, "name of the run; empty: the configuration file's name");
    f("run_dir", run_dir, "run folder, relative to the working folder; empty: runs/NAME");
    f("model", model, "");
    f("lora", lora, "");
    f("data", data, "");
    f("train", train, "");
    f("optimizer", optimizer, "");
    f("parallel", parallel, "");
    f("eval", eval, "");
    f("analysis", analysis, "");
    f("checkpoint", checkpoint, "");
    f("log", log, "");
  }
};

}  // namespace sluice
