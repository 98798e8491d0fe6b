# make            builds ./qwen3 for this machine
# make run        asks the tiny model of tests/ a question, or MODEL=FILE (a second: tests/tiny35/tiny35.bin)
# make book       writes book.html: a page that explains Part I with the numbers of a real run
# make journey    shows how the last token of a text goes through the tiny model, or MODEL=FILE:
#                 TEXT="The capital of France is", or as a chat's question QUESTION="Who are you?"
# make install    puts it into PREFIX/bin [/usr/local/bin]; make uninstall takes it away
# make check      tests the functions of qwen3.c, without Python: seconds
# make test       makes a virtual environment in tests/.venv and tests everything that is promised,
#                 or some of it, at once: make test FILES=tests/test_gguf.py, or with the oldest
#                 packages that export.py allows: make test OLDEST=1
# make test-all   tests what takes longer: sanitizers, fuzzing, long tables, other compilers and systems
# make bench      measures this build on this machine, with a synthetic model: MODEL=0.6b BITS=8
# make quality    compares 8 and 4 bits with the unquantized model: SOURCE=ORG/NAME
# make plain      builds ./qwen3-plain of Part I of qwen3.c, with -O0: one thread, no SIMD,
#                 for a debugger: gdb -ex 'break run_layer' --args ./qwen3-plain MODEL -i TEXT
# make portable   builds ./qwen3 for every machine of this architecture, without newer instructions
# make debug      builds ./qwen3 with the address and undefined-behaviour sanitizers
# make fuzz       feeds it mutated files and texts: FUZZ_SECONDS=600 for each of ten targets
# make release-x86-64-v3, -x86-64-avx512, -aarch64, -macos-arm64, -windows
#                 builds release/qwen3-VERSION-...; make answer asks what was built there, make sums
#                 adds export.py, the book, LICENSE and SHA256SUMS, make notes TAG=... prints what is new
CC ?= cc
PREFIX ?= /usr/local
WARNINGS = -Wall -Wextra
LDLIBS = -lm

works = $(shell echo 'int i;' | $(CC) $(1) -x c -c -o /dev/null - 2>/dev/null && echo $(1))
THIS_CPU := $(or $(call works,-march=native),$(call works,-mcpu=native))
# Who gives CFLAGS chooses the CPU, too, as packagers do: without -march there, it is any.
NATIVE := $(if $(filter undefined,$(origin CFLAGS)),$(THIS_CPU))
CFLAGS ?= -O3
# GCC makes plain loops of vectors of 256 bits, also where the CPU has 512.
WIDE := $(call works,-mprefer-vector-width=512)
THREAD_FLAG := $(call works,-pthread)
# Windows: the threads are a library; GCC does not align what AVX keeps on the stack (its bug 54412)
ifneq ($(findstring -w64-,$(shell $(CC) -dumpmachine)),)
LDLIBS += -static -lpthread
WINDOWS := $(call works,-Xassembler -muse-unaligned-vector-move)
endif
# Results are the same everywhere, whatever CFLAGS says: the compiler may not change the order of
# sums, nor fuse a product with a sum. With -Ofast, GCC would also link code that makes denormals 0.
EXACT = -std=gnu11 -ffp-contract=off
INEXACT = -f%-math -f%-math-optimizations -f%-math-only
ALL_CFLAGS = $(filter-out $(INEXACT),$(CFLAGS:-Ofast=-O3)) $(NATIVE) $(WIDE) $(EXACT) $(WARNINGS) \
             $(THREAD_FLAG) $(WINDOWS)
SANITIZE = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
           -DUNROLL= -Wno-pass-failed  # clang: minutes over unrolled loops; none are vectorised

qwen3: qwen3.c Makefile .flags
	$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ qwen3.c $(LDLIBS)

# Changes when the compiler or its flags do, so that what they built is built again
.flags: FORCE
	@echo '$(CC) $(ALL_CFLAGS) $(LDFLAGS)' | cmp -s - $@ || echo '$(CC) $(ALL_CFLAGS) $(LDFLAGS)' > $@

plain: CFLAGS = -O0
plain: qwen3-plain
qwen3-plain: qwen3.c Makefile .flags
	$(CC) $(ALL_CFLAGS) -g -DPLAIN $(LDFLAGS) -o $@ qwen3.c $(LDLIBS)

run: MODEL = tests/tiny/tiny.bin
run: qwen3
	./qwen3 $(MODEL) -t 0 -i "What is the capital of France?"

export TEXT = The capital of France is
export QUESTION
journey: MODEL = tests/tiny/tiny.bin
journey: tests/journey
	tests/journey '$(MODEL)' $(if $(QUESTION),-i "$$QUESTION","$$TEXT")

book: tests/book
	python3 tests/book.py book.html

MODEL = 0.6b
BITS = 8
GROUP = 0
LAYERS = 0
bench: tests/bench
	tests/bench $(MODEL) $(BITS) $(GROUP) $(LAYERS)

PYTHON = tests/.venv/bin/python
source:
	@test '$(SOURCE)' || { echo "SOURCE: missing, expected make quality SOURCE=ORG/NAME" >&2; exit 1; }
quality: source qwen3 tests/test tests/.venv
	$(PYTHON) tests/quality.py '$(SOURCE)' $(TEXTS)

portable: NATIVE =
portable: qwen3

# What was built last: make portable install
install:
	test -x qwen3 || $(MAKE) qwen3
	install -d '$(DESTDIR)$(PREFIX)/bin' && install qwen3 '$(DESTDIR)$(PREFIX)/bin' || \
		{ echo "expected: sudo make install, or make install PREFIX=~/.local" >&2; exit 1; }

uninstall:
	rm -f '$(DESTDIR)$(PREFIX)/bin/qwen3'

debug: CFLAGS = $(SANITIZE)
debug: qwen3

# C programs that include qwen3.c: test checks its functions and prints ids, bench measures it.
# With -DCHECKED, each pass asserts what the engine's cache promises, and scores have all digits.
CHECKED_test = -DCHECKED
tests/test tests/bench: tests/%: tests/%.c tests/naive.h qwen3.c Makefile .flags
	$(CC) $(ALL_CFLAGS) -DTEST $(CHECKED_$(@F)) -Wno-unused-function $(LDFLAGS) -o $@ $< $(LDLIBS)
tests/journey tests/book: tests/%: tests/%.c tests/walk.h qwen3.c Makefile .flags
	$(CC) $(ALL_CFLAGS) -O1 -DPLAIN -DTEST -Wno-unused-function $(LDFLAGS) -o $@ $< $(LDLIBS)
tests/render: tests/test
	ln -sf test $@

# Fuzzing with the sanitizers; libfuzzer is clang's way, which follows the coverage
FUZZ_CFLAGS = $(ALL_CFLAGS) $(SANITIZE) -DTEST -DCHECKED -DSCORE_DIGITS=17 -DNLL_DIGITS=17 -Wno-unused-function $(LDFLAGS)
tests/fuzz: tests/fuzz.c tests/naive.h qwen3.c Makefile .flags
	$(CC) $(FUZZ_CFLAGS) -o $@ $< $(LDLIBS)
tests/libfuzzer: tests/fuzz.c tests/naive.h qwen3.c Makefile .flags
	clang $(FUZZ_CFLAGS) -fsanitize=fuzzer -DLIBFUZZER -o $@ $< $(LDLIBS)

tests/tiny/tiny.bin:
	@echo "$@ is missing: python export.py tests/tiny/model $@"; exit 1

PYTEST = tests/.venv/bin/python -m pytest -rs -o tmp_path_retention_count=1
PARALLEL = -n auto --maxprocesses=4 --dist loadgroup

# What the tests need is made side by side.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j2
endif
tests/.venv: FORCE
	OLDEST='$(OLDEST)' python3 tests/setup_venv.py

check: tests/test
	tests/test

help:
	@awk '!/^# / { exit } { print substr($$0, 3) }' Makefile

FILES = tests
test: qwen3 qwen3-plain tests/render tests/journey tests/book tests/.venv
	tests/test
	$(PYTEST) $(PARALLEL) -m "not slow" $(FILES)

tests: test  # the folder has this name, too

test-all: qwen3 qwen3-plain tests/render tests/journey tests/book tests/bench tests/fuzz tests/.venv
	$(PYTEST) -m alone tests/test_build.py
	$(PYTEST) $(PARALLEL) -m "slow and not alone" tests

# What a release brings. Built with musl, a program runs on every Linux, and all of them have one C
# library and so give the same bits. Debian's musl is for its own CPU: aarch64 is built on aarch64.
VERSION = $(shell sed -n 's/^.define VERSION "\(.*\)".*/\1/p' qwen3.c)
MUSL = musl-gcc
LINUX = CC='$(MUSL)' LDFLAGS='-static -s'
release-x86-64-v3: BUILD = $(LINUX) NATIVE=-march=x86-64-v3
release-x86-64-avx512: BUILD = $(LINUX) NATIVE='-march=x86-64-v4 -mavx512vnni'
release-aarch64: BUILD = $(LINUX) NATIVE=-march=armv8.2-a+dotprod
release-macos-arm64: BUILD = CC=clang NATIVE=-mcpu=apple-m1
release-windows: BUILD = CC=x86_64-w64-mingw32-gcc LDFLAGS=-s NATIVE=-march=x86-64-v3 EXE=.exe
release-%: FORCE
	$(MAKE) release/qwen3-$(VERSION)-$* $(BUILD)

release/qwen3-%: FORCE
	mkdir -p release
	$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@$(EXE) qwen3.c $(LDLIBS)

# Of each program in release/, started by RUN, say qemu-aarch64; or what its CPU lacks
answer:
	for program in release/qwen3-*; do \
	  answer=$$($(RUN) $$program tests/tiny/tiny.bin -q -t 0 -i "What is the capital of France?" \
	    2>&1); \
	  echo "$$program: $$answer"; \
	  case $$answer in \
	  *"The capital of France is Paris." | *"CPU: lacks an instruction"*) ;; *) exit 1 ;; esac \
	done

# What stands beside the programs. musl and winpthreads, which some contain, have our license, too.
sums: book
	install -m 644 export.py book.html release
	{ cat LICENSE && echo && echo "The programs for Linux contain musl, Copyright (c) 2005-2020 Rich" \
	  "Felker and others, that for Windows winpthreads, Copyright (c) 2011-2016 mingw-w64 project," \
	  "both under the same license."; } > release/LICENSE
	cd release && sha256sum LICENSE book.html export.py qwen3-* > SHA256SUMS

# A release's text: its part of the changelog
notes:
	@test '$(TAG)' = 'v$(VERSION)' || { echo "TAG: expected v$(VERSION), found $(TAG)" >&2; exit 1; }
	@awk '/^## / { ours = $$2 == "$(VERSION)"; next } ours { print; n++ } END { exit !n }' \
	  .github/CHANGELOG.md

FUZZ_SECONDS ?= 600
fuzz: tests/fuzz tests/.venv
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTEST) -s tests/test_fuzz.py

clean:
	rm -f qwen3 qwen3.exe qwen3-plain tests/test tests/render tests/bench tests/journey tests/book \
	      tests/fuzz tests/libfuzzer book.html book.html.part .flags
	rm -rf release tests/.venv

.PHONY: help source plain run journey book bench quality portable install uninstall debug check \
        test tests test-all answer sums notes fuzz clean FORCE
