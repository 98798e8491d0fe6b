# make            builds ./qwen3 for this machine
# make run        asks the tiny model of tests/ a question
# make journey    shows how a token goes through the tiny model: TEXT="The capital of France is"
# make install    puts it into PREFIX/bin [/usr/local/bin]; make uninstall takes it away
# make test       makes a virtual environment in tests/.venv and tests everything that is promised
# make test-all   tests what takes longer: sanitizers, fuzzing, long tables, other compilers and systems
# make bench      measures this build on this machine, with a synthetic model: MODEL=0.6b BITS=8
# make portable   builds ./qwen3 for every machine of this architecture, without newer instructions
# make debug      builds ./qwen3 with the address and undefined-behaviour sanitizers
# make fuzz       feeds it mutated files and texts: FUZZ_SECONDS=600 for each of nine targets
CC ?= cc
CFLAGS ?= -O3
PREFIX ?= /usr/local
WARNINGS = -Wall -Wextra
LDLIBS = -lm

works = $(shell echo 'int i;' | $(CC) $(1) -x c -c -o /dev/null - 2>/dev/null && echo $(1))
NATIVE := $(or $(call works,-march=native),$(call works,-mcpu=native))
# GCC makes plain loops of vectors of 256 bits, also where the CPU has 512.
WIDE := $(call works,-mprefer-vector-width=512)
THREAD_FLAG := $(call works,-pthread)
# Windows: the threads are a library; GCC does not align what AVX keeps on the stack (its bug 54412)
ifneq ($(findstring -w64-,$(shell $(CC) -dumpmachine)),)
LDLIBS += -static -lpthread
WINDOWS := $(call works,-Xassembler -muse-unaligned-vector-move)
endif
# Results are the same everywhere: the compiler may not fuse a product with a sum.
ALL_CFLAGS = $(CFLAGS) $(NATIVE) $(WIDE) -std=gnu11 -ffp-contract=off $(WARNINGS) \
             $(THREAD_FLAG) $(WINDOWS)
SANITIZE = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
           -DNO_UNROLL -Wno-pass-failed  # clang: minutes over unrolled loops; none are vectorised

qwen3: qwen3.c Makefile tests/.flags
	$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ qwen3.c $(LDLIBS)

# Changes when the compiler or its flags do, so that what they built is built again
tests/.flags: FORCE
	@echo '$(CC) $(ALL_CFLAGS) $(LDFLAGS)' | cmp -s - $@ || echo '$(CC) $(ALL_CFLAGS) $(LDFLAGS)' > $@

run: qwen3
	./qwen3 tests/tiny/tiny.bin -t 0 -i "What is the capital of France?"

export TEXT = The capital of France is
journey: tests/journey
	tests/journey "$$TEXT"

MODEL = 0.6b
BITS = 8
GROUP = 0
LAYERS = 0
bench: tests/bench
	tests/bench $(MODEL) $(BITS) $(GROUP) $(LAYERS)

portable: NATIVE =
portable: qwen3

# What was built last: make portable install
install:
	test -x qwen3 || $(MAKE) qwen3
	install -d '$(DESTDIR)$(PREFIX)/bin'
	install qwen3 '$(DESTDIR)$(PREFIX)/bin'

uninstall:
	rm -f '$(DESTDIR)$(PREFIX)/bin/qwen3'

debug: CFLAGS = $(SANITIZE)
debug: qwen3

# C programs that include qwen3.c: test checks its functions and prints ids, bench measures it
tests/test tests/bench: tests/%: tests/%.c tests/naive.h qwen3.c Makefile tests/.flags
	$(CC) $(ALL_CFLAGS) -DTEST -Wno-unused-function $(LDFLAGS) -o $@ $< $(LDLIBS)
# In plain C, which is built in two seconds
tests/journey: tests/journey.c qwen3.c Makefile tests/.flags
	$(CC) $(filter-out $(NATIVE),$(ALL_CFLAGS)) -O1 -DTEST -Wno-unused-function $(LDFLAGS) \
	  -o $@ $< $(LDLIBS)
tests/render: tests/test
	ln -sf test $@

# Fuzzing with the sanitizers; libfuzzer is clang's way, which follows the coverage
FUZZ_CFLAGS = $(ALL_CFLAGS) $(SANITIZE) -DTEST -Wno-unused-function $(LDFLAGS)
tests/fuzz: tests/fuzz.c tests/naive.h qwen3.c Makefile tests/.flags
	$(CC) $(FUZZ_CFLAGS) -o $@ $< $(LDLIBS)
tests/libfuzzer: tests/fuzz.c tests/naive.h qwen3.c Makefile tests/.flags
	clang $(FUZZ_CFLAGS) -fsanitize=fuzzer -DLIBFUZZER -o $@ $< $(LDLIBS)

tests/tiny/tiny.bin:
	@echo "$@ is missing: python export.py tests/tiny/model $@"; exit 1

PYTEST = tests/.venv/bin/python -m pytest -rs -o tmp_path_retention_count=1
PARALLEL = -n auto --maxprocesses=4 --dist loadgroup

# What the tests need is made side by side.
MAKEFLAGS += -j2
tests/.venv: FORCE
	python3 tests/setup_venv.py

test: qwen3 tests/render tests/journey tests/.venv
	tests/test
	$(PYTEST) $(PARALLEL) -m "not slow" tests

test-all: qwen3 tests/render tests/journey tests/bench tests/fuzz tests/.venv
	$(PYTEST) -m alone tests/test_build.py
	$(PYTEST) $(PARALLEL) -m "slow and not alone" tests

FUZZ_SECONDS ?= 600
fuzz: tests/fuzz tests/.venv
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTEST) -s tests/test_fuzz.py

clean:
	rm -f qwen3 qwen3.exe tests/test tests/render tests/bench tests/journey tests/fuzz \
	      tests/libfuzzer tests/.flags

.PHONY: run journey bench portable install uninstall debug test test-all fuzz clean FORCE
