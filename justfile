# The verbs of the project. `.ci/run` runs the same commands, one after another.

# What to run before each push: minutes
check: fmt clippy test doc

# All verbs
list:
    @just --list

# The whole gate
gate:
    .ci/run

fmt:
    cargo fmt --all --check

clippy:
    cargo clippy --workspace --all-features --all-targets --locked -- -D warnings

test *args:
    cargo test --workspace --all-features --locked {{args}}

# The case table, failing unless it covered this instruction set: portable, avx2 or avx512
test-isa isa:
    REGARD_REQUIRE_ISAS={{isa}} cargo test -p regard --test all --locked -- --nocapture table::

# Every float of the range of exp2: a minute
test-exp:
    cargo test --release -p regard --lib --locked -- --ignored --nocapture exp2

# The engine on the caller's thread alone
no-rayon:
    cargo check -p regard --no-default-features --locked

doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --locked

# Licences and sources of all that is linked
licences:
    .ci/licences

# The same by cargo-deny, and advisories, whose list must be fetched from the internet
deny:
    cargo deny --all-features --locked check

# One fuzz target, problem_new, forward_vs_reference, backward_vs_reference, cache or trace_load, on the stable toolchain
fuzz target seconds="60":
    fuzz/run {{target}} {{seconds}}

# The same under the address sanitizer; needs a nightly toolchain and cargo-fuzz
asan target seconds="60":
    cargo +nightly fuzz run {{target}} -- -max_total_time={{seconds}} -timeout=60 -len_control=0 -max_len=400

# The case table against the definition, in release, on this machine
table:
    cargo run --release --locked -p regard-cli -- check

# All experiments at full size: their numbers into bench/record/lab, their pictures into docs/lab. Minutes
lab:
    cargo build --release --locked -p regard-cli --features full
    mkdir -p bench/record/lab
    target/release/regard lab all --out docs/lab --format json > bench/record/lab/lab.jsonl

# Runs that are killed, starved and disturbed, against one that was left alone: minutes
survive *args:
    cargo build --workspace --all-features --locked
    crates/regard-train/survive {{args}}

# Every example, once
examples:
    examples/run

# Both editions of the book, with their links, code and commands checked; needs mdbook
book:
    book/check

# Image, manifests, unit and dashboard of the server against their schemas and its source
deploy:
    deploy/check

# The reference pages of the book that are made of help texts and docstrings; needs the built command and Python module
reference python="target/python/bin/python":
    book/command-reference
    PYTHONPATH=python {{python}} book/python-api
    book/errors-check --write

bench *args:
    cargo run --release --locked -p regard-cli -- bench run {{args}}

# goldens/*.safetensors, by a Python with the packages that goldens/make.py names
goldens python="python3" *names:
    {{python}} goldens/make.py {{names}}
    {{python}} goldens/adamw.py

# The table of architectures in docs/models.md and the book, against Transformers: by a Python that has it
architectures python="target/python/bin/python":
    rm -rf target/hub
    {{python}} crates/regard-models/tests/hub/make.py target/hub
    cargo run --locked --workspace --all-features --example agree -- --out bench/record/architectures.jsonl target/hub/*
    bench/tables.py

# The pictures of docs/gallery.md and of the README, from real models
gallery:
    cargo run --locked -p regard-scope --example gallery -- target/gallery
    cp target/gallery/*.png docs/gallery/
    cargo build --release --locked -p regard-cli --features full
    docs/gallery/hero

# The pages in a real browser: needs node, npm and chromium
web:
    cargo build --release --locked -p regard-cli
    crates/regard-scope/web/run target/release/regard

# A training run on MPI ranks that are killed 20 times, with another number of ranks each time
kills count="20":
    REGARD_KILLS={{count}} cargo test -p regard-cli --all-features --locked --test mpi -- --nocapture killed

# Ranks on two hosts with a slow network between them (network namespaces; root), a rank that is stopped, a link that goes down
network:
    cargo build --release --locked -p regard-cli --features mpi
    bench/network target/release/regard

# The inner loops of the engine as they are compiled, against their record; `just leaves --update` writes it
leaves *args:
    bench/leaves.py {{args}}

# The Python modules without the command line, in place: PYTHONPATH=python then finds them
py:
    cargo build --release --locked -p regard-python --no-default-features
    cp target/release/lib_regard.so python/regard/_regard.abi3.so
    cargo build --release --locked -p regard-python-models
    cp target/release/lib_regard_models.so python/_regard_models.abi3.so

# The tests of the Python package, in an environment with PyTorch and Transformers (made once)
test-py *args: py
    test -x target/python/bin/python || python/environment target/python
    PYTHONPATH=python target/python/bin/python -m pytest -q -p no:cacheprovider python/tests {{args}}

# Jobs over a corpus on four engines, while workers, nodes, executors and drivers are killed: minutes. As root, for the full disk
faults *args: py
    test -x target/faults/bin/python || python/tests/faults/environment target/faults
    PYTHONPATH=python target/faults/bin/python python/tests/faults/suite.py {{args}}

# A test suite of others, against Regard: docs/judges.md
judges suite *args: py
    test -x target/python/bin/python || python/environment target/python
    python/tests/judges/environment target/python
    PYTHONPATH=python target/python/bin/python python/tests/judges/run.py {{suite}} {{args}}

# The wheel, tried as a user would
wheel:
    python/wheel
