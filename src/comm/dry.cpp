#include "comm/communicator.h"

namespace sluice {
namespace {

class Dry : public Communicator {
 public:
  Dry(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "dry"; }
  [[noreturn]] void abort(ExitCode) override { refuse("abort"); }

 protected:
  void do_barrier() override { refuse("barrier"); }
  void do_broadcast(void*, int64_t, int) override { refuse("broadcast"); }
  void do_all_gather(void*, const void*, int64_t) override { refuse("all_gather"); }
  void do_all_to_all_v(void*, const int64_t*, const void*, const int64_t*) override {
    refuse("all_to_all_v");
  }
  void do_send(const void*, int64_t, int) override { refuse("send"); }
  void do_receive(void*, int64_t, int) override { refuse("receive"); }
  std::unique_ptr<Communicator> do_split(int, int) override {
    refuse("split");
  }  // the values of the other ranks are unknown
  std::unique_ptr<Communicator> do_axis(int stride, int size) override {
    return make_dry_communicator(rank_ / stride % size, size);
  }

 private:
  [[noreturn]] void refuse(const char* operation) const {
    fail(ExitCode::internal, "{}: rank {} of {} does not exist; a dry run moves nothing", operation, rank_,
         size_);
  }

  int rank_, size_;
};

}  // namespace

std::unique_ptr<Communicator> make_dry_communicator(int rank, int size) {
  SLUICE_CHECK(rank >= 0 && rank < size, "make_dry_communicator: rank {} of {}", rank, size);
  return std::make_unique<Dry>(rank, size);
}

}  // namespace sluice
