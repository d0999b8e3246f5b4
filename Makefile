# make help      this list
# make demo      Tests 1 to 3: train, resume on fewer ranks, accumulate, convert; pictures and numbers in out/; 6 minutes
# make elastic   machines that die and come back while a job trains; 30 minutes
# make hosts     three hosts whose cable is pulled, and two that launchers reach by ssh, on this machine; 10 minutes
# make exact     the same bits on 1, 2, 4 and 8 ranks, from scratch and along a chain of checkpoints; 20 to 30 minutes
# make 3d        change the tensor, pipeline and sequence layout; 30 minutes
# make resume    what it costs to resume a model of 86 million parameters, and of 353, and by others' means; 9 minutes
# make clients   the scripts of examples/ under Hugging Face's Trainer, accelerate, Lightning and TRL, on other ranks
# make clients-cli  LLaMA-Factory and ms-swift, which have commands instead of scripts, on other ranks; 20 minutes
# make versions  the DeepSpeeds from 0.16.4 on: saved and loaded by each, and by this one; 9 minutes
# make trainers  the transformers from 4.55 on, and TRL's trainers, saved and loaded by each on other ranks; 60 minutes
# make deepspeed-suite  DeepSpeed's own checkpoint tests through install(); they are in DEEPSPEED, a clone: ./DeepSpeed
# make engines   every kind of engine that DeepSpeed builds on a CPU: saved, loaded on the same ranks and others; 5 minutes
# make keys      every key of DeepSpeed's config: what it changes, and what becomes of it in a resume
# make optimizers  what ZeRO makes of the optimizers that people use, and how they resume; an hour
# make mirror    what a save, and a copy in another machine's memory, cost a step; 4 minutes
# make scale     what a load costs beside its tensors on 8 to 64 ranks, and played on 4,096; a picture of the growth; an hour
# make chaos     a public tester kills trainings at files that a save touches (POINTS=1000: at all), and resumes them; 5 minutes
# make proof    what the comparison of the next steps costs a step; a minute
# make sums     what bf16 rounds of the sum of micro-batches, and what fp32 costs; 2 minutes
# make findings  what other packages do that nobody guesses, each script alone; NAME=: one of them; 30 minutes
# make lesson    the notebook from top to bottom; compares its numbers with those it was committed with; 3 minutes
# make gpu       on NVIDIA cards, one or several: precisions, layouts, costs; a table to report; 5 minutes
# make assets    demo, elastic, exact, 3d and resume again, into assets/, where the pages' pictures and tables are
# make test      the quick tests, in an environment of their own making; 5 minutes and the installation
# make test-all  these and the long ones: every change of ranks and stage, clients, versions; 45 minutes
# make lint      ruff
# make clean     remove what these, and the commands on the pages, have made, but not .venv

PYTHON ?= python3
RANKS   = .venv/bin/deepspeed --num_gpus
PY      = .venv/bin/python
CKPT    = ds_transformer_checkpoint
export TORCH_EXTENSIONS_DIR = $(CURDIR)/.venv/torch_extensions

BATCHES = --train_batch_size 256 --train_micro_batch_size_per_gpu 64
TRAIN   = train.py $(BATCHES) --steps 200 --checkpoint_dir $(CKPT)
RESUME  = $(TRAIN) --resume --checkpoint_interval 400
EXAMPLES = $(wildcard examples/train_*.py)
PACKAGE = $(wildcard universal/*.py universal/*/*.py)
OUT     = out
RUN     = $(basename $(@F))

# Four ranks want four GPUs. Where there are fewer, these train on the CPU.
GPUS := $(shell nvidia-smi -L 2> /dev/null | grep -c ^GPU)
ifneq ($(filter 1 2 3,$(GPUS)),)
demo elastic exact 3d resume: export CUDA_VISIBLE_DEVICES =
demo elastic exact 3d resume: export DS_ACCELERATOR = cpu
$(if $(filter demo elastic exact 3d resume,$(MAKECMDGOALS)),$(info $(GPUS) GPU(s) for 4 ranks: training on the CPU))
endif

# $(call run,command,name): show the command; what it prints goes to logs/name.txt
define run
@echo "$(1)"
@mkdir -p logs; $(1) > logs/$(2).txt 2>&1 || { tail -n 20 logs/$(2).txt; exit 1; }
endef

# $(call plot,logs,tolerance): compare them; the table goes beside the picture
define plot
@mkdir -p $(OUT)
$(PY) plot.py $(1) --output $@ --tolerance $(2) > $(basename $@).txt
@cat $(basename $@).txt
endef

.PHONY: help demo elastic hosts exact 3d keys resume clients clients-cli versions trainers deepspeed-suite engines optimizers proof sums \
	mirror scale chaos lesson findings gpu assets test test-all lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' $(firstword $(MAKEFILE_LIST))

demo: $(OUT)/resume.png $(OUT)/stock.txt $(OUT)/resume_no_uc.png \
	$(OUT)/folders.png $(OUT)/shares.txt $(OUT)/grad_accu.png $(OUT)/resume_uc.png $(OUT)/stock_3.txt \
	$(OUT)/traps.txt $(OUT)/diff.txt

# $(call cpu_torch,pip,pin): without an NVIDIA driver torch's CPU build will do: 200 megabytes in place of gigabytes
define cpu_torch
{ command -v nvidia-smi > /dev/null || $(1) install -q --no-deps --retries 1 --timeout 15 \
	--index-url https://download.pytorch.org/whl/cpu $(2) 2> /dev/null \
	|| echo "torch: its CPU build is not to be had; this installs PyPI's, with gigabytes of CUDA libraries"; }
endef

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	@$(call cpu_torch,.venv/bin/pip,$(shell grep ^torch== requirements.txt))
	.venv/bin/pip install -q -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	.venv/bin/pip install -q -r requirements-dev.txt
	touch $@

.venv/installed-clients: .venv/installed-dev measure/clients/requirements.txt
	.venv/bin/pip install -q -r measure/clients/requirements.txt
	touch $@

# Three processes on two cores, because some tests wait. A module's tests stay together, because they share what its
# fixtures have trained. Modules begin in the order of testpaths, the long ones first, not those with the most tests.
TEST = $(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test: .venv/installed-dev
	$(TEST)

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

test-all: test
	$(TEST) -m slow tests/load tests/save tests/proof tests/exact
	$(TEST) -m slow tests/convert tests/look tests/pages
	$(TEST) -m slow tests/lesson tests/batch
	$(MAKE) clients versions
	$(MAKE) chaos POINTS=2

clean:
	rm -rf .venv-versions .venv-trainers .venv-clients-cli logs out runs ckpt_* $(CKPT) docs/class.ipynb build *.egg-info

assets: .venv/installed
	$(MAKE) OUT=assets demo elastic exact 3d resume

# Test 1: a checkpoint of 4 ranks resumes on 3, and on 4; DeepSpeed alone refuses the 3. These two resumes see
# global_step100 in a folder of their own, and save step 200 there, to be compared with that of the first run.
logs/default.csv: .venv/installed train.py $(PACKAGE)
	$(call run,$(RANKS) 4 $(TRAIN) --run_name default --checkpoint_interval 100,default)

AGAIN = train.py $(BATCHES) --steps 200 --checkpoint_dir ckpt_$(RUN) --resume --checkpoint_interval 200
logs/resume.csv logs/resume_no_uc.csv: logs/default.csv
	@mkdir -p ckpt_$(RUN)
	@ln -sfn ../$(CKPT)/global_step100 ckpt_$(RUN)/global_step100
	$(call run,$(RANKS) $(RANKS_OF_$(RUN)) $(AGAIN) --checkpoint_tag global_step100 --run_name $(RUN),$(RUN))
RANKS_OF_resume = 3
RANKS_OF_resume_no_uc = 4

$(OUT)/resume.png: logs/default.csv logs/resume.csv plot.py
	$(call plot,logs/default.csv logs/resume.csv,1e-5)

$(OUT)/stock.txt: logs/default.csv
	@mkdir -p $(OUT)
	@echo "$(RANKS) 3 $(RESUME) --checkpoint_tag global_step100 --run_name stock --stock"
	@$(RANKS) 3 $(RESUME) --checkpoint_tag global_step100 --run_name stock --stock > logs/stock.txt 2>&1; test $$? -ne 0
	@grep -o -m 1 "[A-Za-z]*Exception: The checkpoint.*" logs/stock.txt > $@
	@cat $@

$(OUT)/resume_no_uc.png: logs/default.csv logs/resume_no_uc.csv plot.py
	$(call plot,logs/default.csv logs/resume_no_uc.csv,0)

# The same of the weights and moments: of step 100 and what it converts into, of step 200 and both resumes'
$(OUT)/diff.txt: logs/resume.csv logs/resume_no_uc.csv $(CKPT)/latest_universal measure/weights.py
	@mkdir -p $(OUT)
	$(PY) -m measure.weights $(CKPT) ckpt_resume_no_uc ckpt_resume > $@ || { cat $@; exit 1; }
	@cat $@

$(OUT)/folders.png: logs/default.csv measure/folders.py
	$(PY) -m measure.folders $(CKPT)/global_step100 --output $@

$(OUT)/shares.txt: .venv/installed measure/shares.py universal/batches.py
	@mkdir -p $(OUT)
	$(PY) -m measure.shares --output $(OUT)/shares.png > $@

# Test 2: accumulation, in PyTorch and on DeepSpeed; of two patterns make takes that with the shorter stem
ACCU = --run_name $(RUN) --train_micro_batch_size_per_gpu
logs/pt_%.csv: .venv/installed grad_accu_pt.py
	$(call run,$(PY) grad_accu_pt.py $(ACCU) $*,$(RUN))

logs/ds_%.csv: .venv/installed grad_accu_ds.py
	$(call run,$(RANKS) 1 grad_accu_ds.py $(ACCU) $*,$(RUN))

logs/ds_8_ws%.csv: .venv/installed grad_accu_ds.py
	$(call run,$(RANKS) $* grad_accu_ds.py $(ACCU) 8,$(RUN))

SIX_WAYS = $(addprefix logs/,$(addsuffix .csv,pt_32 pt_8 ds_32 ds_8 ds_8_ws2 ds_8_ws3))
$(OUT)/grad_accu.png: $(SIX_WAYS) plot.py
	$(call plot,$(SIX_WAYS),1e-5)

$(OUT)/traps.txt: .venv/installed measure/traps.py grad_accu_pt.py grad_accu_ds.py
	@mkdir -p $(OUT)
	$(PY) -m measure.traps > $@
	@cat $@

# Test 3: a universal checkpoint resumes on any number of ranks, with DeepSpeed's own loader, too
$(CKPT)/latest_universal: logs/default.csv ds_to_universal.py $(PACKAGE)
	$(PY) ds_to_universal.py --input_folder $(CKPT)/global_step100/ --output_folder $(CKPT)/global_step100_universal \
		--num_extract_workers 4 --num_merge_workers 4

logs/resume_uc_4gpu.csv logs/resume_uc_3gpu.csv logs/resume_uc_2gpu.csv: RESUME += --checkpoint_tag global_step100_universal --universal_checkpoint
logs/resume_uc_%gpu.csv: $(CKPT)/latest_universal
	$(call run,$(RANKS) $* $(RESUME) --run_name $(RUN),$(RUN))

# DeepSpeed's own loader loses state at ZeRO-3, and the next steps show it
ZERO_3 = train.py --zero_stage 3 --steps 20 --checkpoint_dir ckpt_zero_3
STOCK_3 = $(RANKS) 2 $(ZERO_3) --run_name stock_3 --resume --checkpoint_tag global_step10_universal --universal_checkpoint --stock
logs/zero_3.csv: .venv/installed train.py $(PACKAGE)
	$(call run,$(RANKS) 4 $(ZERO_3) --checkpoint_interval 10 --run_name zero_3,zero_3)

$(OUT)/stock_3.txt: logs/zero_3.csv
	@mkdir -p $(OUT)
	$(PY) ds_to_universal.py --input_folder ckpt_zero_3/global_step10
	$(call run,$(STOCK_3),stock_3)
	@grep -o "universal: WARNING: step.*" logs/stock_3.txt > $@
	@cat $@

$(OUT)/resume_uc.png: logs/resume_uc_4gpu.csv logs/resume_uc_3gpu.csv logs/resume_uc_2gpu.csv plot.py
	$(call plot,logs/default.csv logs/resume_uc_4gpu.csv logs/resume_uc_3gpu.csv logs/resume_uc_2gpu.csv,1e-5)

# Machines that die and come back
elastic: $(OUT)/elastic.txt

$(OUT)/elastic.txt: .venv/installed measure/elastic.py train.py $(EXAMPLES) $(PACKAGE)
	@mkdir -p $(OUT)
	$(PY) -m measure.elastic --output $(OUT)/elastic.png > $@
	$(PY) -m measure.elastic --mirror 1 --zero_stage 3 >> $@
	$(PY) -m measure.elastic --mirror 1 --rounding >> $@
	@cat $@

hosts: .venv/installed-dev
	@mkdir -p $(OUT)
	setpriv --pdeathsig KILL unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc \
		$(PY) -m measure.hosts > $(OUT)/hosts.txt
	$(PY) -m measure.launchers >> $(OUT)/hosts.txt
	@cat $(OUT)/hosts.txt

# --exact: every bit alike
exact: $(OUT)/exact.txt

$(OUT)/exact.txt: .venv/installed measure/exact.py plot.py train.py $(EXAMPLES) $(PACKAGE)
	@mkdir -p $(OUT)
	$(PY) -m measure.exact --output $(OUT)/exact.png > $@
	@cat $@

# Other layouts
3d: $(OUT)/3d.txt

$(OUT)/3d.txt: .venv/installed-dev measure/layouts.py plot.py train.py $(EXAMPLES) $(PACKAGE)
	@mkdir -p $(OUT)
	$(PY) -m measure.layouts --output $(OUT)/3d.png > $@
	cat $@

# What a resume costs, of a model of 86 million parameters
resume: $(OUT)/resume_cost.txt $(OUT)/load_cost.txt

$(OUT)/resume_cost.txt: .venv/installed measure/resume.py train.py $(PACKAGE)
	@mkdir -p $(OUT)
	$(PY) -m measure.resume > $@
	sed -i /WARNING/d $@
	@cat $@

$(OUT)/load_cost.txt: .venv/installed measure/resume.py train.py $(PACKAGE)
	@mkdir -p $(OUT)
	$(PY) -m measure.resume --loads > $@
	$(PY) -m measure.resume --loads --large >> $@
	@cat $@

# Training loops that are not ours
clients: .venv/installed-clients
	@mkdir -p $(OUT)
	CLIENTS_TABLE=$(OUT)/clients.txt $(PY) -m pytest -q -m "clients or not clients" tests/pages/test_clients.py tests/batch/test_rollouts.py
	cat $(OUT)/clients.txt

# Commands that have no script
clients-cli: .venv/installed-clients
	@mkdir -p $(OUT)
	$(PY) -m measure.clients.clients_cli > $(OUT)/clients_cli.txt
	@cat $(OUT)/clients_cli.txt

# What a GPU does. Without a network: whatever Python has torch and DeepSpeed
gpu:
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m measure.gpu --output $(OUT)/gpu.txt

# The DeepSpeeds that people have
versions: .venv/installed
	$(PY) -m measure.versions --output $(OUT)/versions.txt

# The transformers that people have
trainers: .venv/installed-dev
	$(PY) -m measure.trainers --output $(OUT)/trainers.txt
	$(PY) -m measure.trl --output $(OUT)/trl.txt

# SUITE: what pytest takes, to choose among them
DEEPSPEED ?= DeepSpeed
deepspeed-suite: .venv/installed-dev
	$(PY) -m measure.deepspeed_suite $(DEEPSPEED) $(SUITE)

# Every kind of engine. Builds DeepSpeed's Adam, once
engines: .venv/installed
	$(PY) -m measure.engines --output $(OUT)/engines.txt

# Every key of DeepSpeed's config
keys: .venv/installed
	@mkdir -p $(OUT)
	$(PY) -m measure.keys > $(OUT)/keys.txt
# The optimizers that people use; in a folder of their own
OPTIMIZERS = pytorch-optimizer==4.1.0 schedulefree==1.4.1 prodigyopt==1.1.2 dadaptation==3.2 torch-optimi==0.3.3 \
	heavyball==3.2.1 lightbench==0.1.1 opt-einsum==3.4.0 bitsandbytes==0.50.2 lion-pytorch==0.2.5
optimizers: .venv/installed-dev
	.venv/bin/pip install -q --no-deps --upgrade --target out/optimizers $(OPTIMIZERS)
	PYTHONPATH=$(CURDIR)/out/optimizers $(PY) -m measure.optimizers --output $(OUT)/optimizers.txt

# What a proof costs
proof: .venv/installed
	@mkdir -p $(OUT)
	$(PY) -m measure.proof > $(OUT)/proof.txt
	@cat $(OUT)/proof.txt

# Sums in bf16
sums: .venv/installed
	@mkdir -p $(OUT)
	$(PY) -m measure.sums > $(OUT)/sums.txt
	@cat $(OUT)/sums.txt

# What a load costs by the number of ranks; BEFORE is what it is drawn beside. Rows that out/ has are kept
BEFORE = 1f77132
scale: .venv/installed
	@mkdir -p $(OUT)
	$(PY) -m measure.scale --output $(OUT)/scale.png --before $(BEFORE)
	@cat $(OUT)/scale.txt

# What a mirror and a save cost a step
mirror: .venv/installed
	@mkdir -p $(OUT)
	$(PY) -m measure.mirror --output $(OUT)/mirror.png > $(OUT)/mirror.txt
	@cat $(OUT)/mirror.txt

# Killed at POINTS files of each way; 1000 for all
POINTS = 12
chaos: .venv/installed
	@mkdir -p $(OUT)
	.venv/bin/pip install -q --no-deps --upgrade --target out/ckpt-chaos ckpt-chaos==0.1.8
	CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu PYTHONPATH=$(CURDIR)/out/ckpt-chaos $(PY) -m measure.chaos --points $(POINTS) > $(OUT)/chaos.txt || { cat $(OUT)/chaos.txt; exit 1; }
	@cat $(OUT)/chaos.txt

lesson: .venv/installed-dev
	$(PY) -m measure.lesson

# Others' surprises, one after the other: what each saw, and whether it is still so
# Each script can install what it needs; here those of the same pins share an environment.
FINDINGS = $(wildcard findings/$(or $(NAME),*).sh)
findings:
	@mkdir -p $(OUT)/findings; code=0; \
	for script in $(FINDINGS); do name=$$(basename $$script .sh); \
		pins=$$(sed -n 's/^pins="\(.*\)"$$/\1/p' $$script); \
		env=$(abspath $(OUT))/findings/$$(echo $$pins | tr ' ' _); \
		[ -x $$env/bin/python ] || ! grep -q FINDINGS_PYTHON $$script || { \
			$(PYTHON) -m venv $$env && $(call cpu_torch,$$env/bin/pip,$${pins%% *}) && \
			$$env/bin/pip install -qq $$pins || rm -rf $$env; }; \
		start=$$(date +%s); \
		if FINDINGS_PYTHON=$$env/bin/python timeout -k 10 1200 $$script > $(OUT)/findings/$$name.txt 2>&1; \
		then state=AS-WRITTEN; else state=CHANGED; code=1; fi; \
		printf "%-10s %4d s  %s\n%18s%s\n" $$state $$(($$(date +%s) - start)) $$name "" \
			"$$(tail -n 1 $(OUT)/findings/$$name.txt)"; \
	done; test -n "$(FINDINGS)" && exit $$code
