# Everything a developer or a curious user types. `make` alone lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/snaporch
# A lab that sees the test guests; what they are built with is printed by `make lab`.
IN_LAB = tests/lab/run --env "SNAPORCH_GUESTS_HOST=$$(tests/lab/guests/build 2>/dev/null)"
LABS = $(if $(JOBS),--jobs $(JOBS))
# Made on first use, so that `make help` and `make lab` need none.
VENV = $(eval VENV := $$(shell tests/venv))$(VENV)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: lab ## snapshot and restore a real guest in the lab, and compare its counts
	@$(IN_LAB) tests/e2e/demo

.PHONY: lab
lab: ## build the lab: real OpenZFS and libvirt on any Debian machine (cached)
	@tests/lab/build
	@tests/lab/guests/build >/dev/null

.PHONY: test
test: check test-unit lab test-lab ## all checks and tests, the lab's included

.PHONY: test-all
test-all: test test-package ## the packages and the long matrices too, with reports in docs/reference/fault-matrix.md and acts-of-others.md
	@RANDOM_EXAMPLES=1 LONG=1 $(VENV)/bin/python -m pytest -q -m "not lab" tests/unit
	@LONG=1 tests/e2e/run $(LABS) test_torn test_load test_fault_windows test_fault_shortages \
		test_restore_interrupted test_layouts test_hostile test_replicate test_destination_contract \
		test_boot_systemd test_verify test_ram_pages_cost test_units_systemd test_confined test_undo \
		test_clone test_groups test_pause test_prune test_sanoid test_pull test_append_only test_verify_on \
		test_rebuild test_pages test_disks test_tpm test_hypervisor_contract test_other_programs \
		test_databases test_slowed \
		test_by_hand test_runs test_luks test_starved_systemd test_pool_contract test_failover \
		test_encrypted_bundles test_copies_retention test_replicate_rounds test_restic test_many_systemd \
		test_shutdown_systemd
	@for day in 1 2 3 4; do DAY=$$day tests/e2e/run $(LABS) test_boot_systemd test_clone test_prune \
		test_replicate test_sanoid test_units_systemd test_verify || exit 1; done
	@FAULTS_SAMPLE=all tests/e2e/faults/run --report docs/reference/fault-matrix.md
	@FAULTS_SAMPLE=all tests/e2e/faults/run --others --report docs/reference/acts-of-others.md
	@$(VENV)/bin/python tests/mutants/run --report docs/reference/mutants.md

.PHONY: test-unit
test-unit: ## tests that need neither ZFS nor a running libvirtd
	@echo "unit and integration tests"
	@test -n "$(VENV)"
	@$(VENV)/bin/python -m pytest -q -n auto -m "not lab and not guestfish" tests/unit tests/integration tests/contract

.PHONY: calendar
calendar: ## a table of the schedule's times over a year in all time zones, beside a naive oracle
	@cd tests && $(VENV)/bin/python -m fakes.calendar

.PHONY: mutants
mutants: ## put deliberate mistakes into deciding modules; which does no test notice? (WORDS="decision")
	@$(VENV)/bin/python tests/mutants/run $(if $(WORDS),$(WORDS),--report docs/reference/mutants.md)

.PHONY: test-lab
test-lab: ## whole flows in the lab (WORDS="uefi names" JOBS=1)
	@tests/e2e/run $(LABS) $(WORDS)

.PHONY: check
check: ## lint, types, direction of imports, spelling, words and links of the pages
	@echo "static checks"
	@test -n "$(VENV)"
	@$(VENV)/bin/ruff check -q .
	@$(VENV)/bin/ruff format -q --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo >$(CACHE)/imports.log 2>&1 || { cat $(CACHE)/imports.log; exit 1; }
	@$(VENV)/bin/codespell
	@tests/prose/check
	@tests/prose/packages --check docs/concepts/design.md
	@tests/prose/modules --check docs/modules.md
	@shellcheck -x -P SCRIPTDIR $$(grep -lE '^#!(/bin/sh|.*bash)' $$(git ls-files))

.PHONY: docs
docs: ## regenerate the pages that are made from the code
	@tests/prose/packages docs/concepts/design.md
	@tests/prose/modules docs/modules.md
	@$(VENV)/bin/python -m snaporch.config.reference > docs/reference/configuration.md

.PHONY: bench
bench: ## measure natively against the rivals (installs libvirtd; BENCH="--rounds 5 --full")
	@$(VENV)/bin/python tests/bench/ram_writer.py
	@tests/bench/native/run $(BENCH)

.PHONY: bench-lab
bench-lab: lab ## in the lab: strategies, fast guests, writes, many guests, exports, the way back; bytes of copies and of records; fairness
	@$(IN_LAB) tests/bench/strategies.py
	@$(IN_LAB) tests/bench/hasty.py
	@$(IN_LAB) tests/bench/way_back.py
	@SNAPORCH_GUESTS=$$(tests/lab/guests/build --only bios,linux) $(VENV)/bin/python -P tests/bench/native/way_back.py
	@$(IN_LAB) --env "VIRTNBDBACKUP_HOST=$$(tests/bench/fetch-virtnbdbackup)" tests/bench/writes.py
	@$(IN_LAB) tests/bench/many.py
	@$(IN_LAB) tests/bench/pages.py
	@$(IN_LAB) tests/bench/export.py
	@$(IN_LAB) tests/bench/copies.py
	@$(IN_LAB) tests/bench/storage.py
	@tests/lab/run --systemd tests/bench/fairness.py

.PHONY: deb
deb: ## build the Debian package (FLAVOUR=vendored: the one for Debian 12 and Ubuntu 24.04)
	@debian/tools/build . $(FLAVOUR)

.PHONY: test-package
test-package: ## install, upgrade and remove both packages in bare Debian systems; files by guestfish
	@tests/package/run
	@tests/package/run vendored
	@tests/package/guest-files

.PHONY: acceptance
acceptance: ## try the package on a stock Debian host, a virtual machine: an hour or two (SUITE=bookworm ACCEL=kvm)
	@tests/acceptance/run --report $(if $(SUITE),--suite $(SUITE)) $(if $(ACCEL),--accel $(ACCEL)) $(WORDS)

.PHONY: clean
clean: ## remove what was built, the cache included
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis "$(CACHE)"
