"""Recipes: every one loads, every mistake is refused with key, value and what would be right, before anything heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

from verst.config import RlRecipe, SftRecipe, load_recipe, missing_files, parse_recipe
from verst.config import sections as s
from verst.config.plan import batch_plan, process_plan
from verst.errors import ConfigError

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
GRPO = ROOT / "tests" / "data" / "grpo.toml"
SFT = ROOT / "recipes" / "glyphs_sft.toml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_survives_being_written_down(path):
    recipe = load_recipe(path)
    assert recipe.run.name == path.stem
    assert parse_recipe(recipe.model_dump(mode="json", exclude_none=True)) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_prompt_files_of_recipes_are_there(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert [line for line in missing_files(load_recipe(path)) if not line.startswith("model.path")] == []


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert missing_files(load_recipe(GRPO)) == [
        "model.path = 'checkpoints/glyphs' does not exist",
        "prompts.train = 'data/glyphs/train.txt' does not exist",
        "prompts.heldout = 'data/glyphs/heldout.txt' does not exist",
    ]
    (tmp_path / "m").mkdir()
    assert len(missing_files(load_recipe(GRPO, ["model.path=m"]))) == 2
    assert not any(line.startswith("model.path") for line in missing_files(load_recipe(SFT)))  # SFT builds it


def test_the_type_of_the_algorithm_decides_the_recipe():
    assert isinstance(load_recipe(GRPO), RlRecipe)
    assert isinstance(load_recipe(SFT), SftRecipe)


KEYS = [
    ("trainer.learning_rte=1", "trainer.learning_rte = 1 is not a key of the recipe; did you mean 'lr'?"),
    ("trainer.learning_rate=1", "did you mean 'lr'?"),
    ("trainer.max_grad_norm=1", "did you mean 'grad_clip'?"),
    ("trainr.lr=1", "trainr = {'lr': 1} is not a key of the recipe; did you mean 'trainer'?"),
    ("run.resume=true", "run.resume = True is not a key of the recipe; valid keys here: deterministic, device"),
    ("sampling.guidance=0", "sampling.guidance = 0 is not a key of the recipe; did you mean 'guidance_scale'?"),
    ("sampling.steps.hgh=3", "sampling.steps.hgh = 3 is not a key of the recipe; did you mean 'high'?"),
    (
        "sampling.steps.eta=3",
        "sampling.steps.eta = 3 is not a key of the recipe; valid keys here: high, low, size, type",
    ),
    ("algorithm.advantage.stdd=1", "algorithm.advantage.stdd = 1 is not a key of the recipe; did you mean 'std'?"),
    ("rewards.0.weigth=1", "rewards.0.weigth = 1 is not a key of the recipe; did you mean 'weight'?"),
    ('model.finetune={type="lora",rnk=8}', "model.finetune.rnk = 8 is not a key of the recipe; did you mean 'rank'?"),
    ("engine.prt=3", "engine.prt = 3 is not a key of the recipe; did you mean 'port'?"),
]

VALUES = [
    ("trainer.lr=-1", "trainer.lr = -1: input should be greater than or equal to 0"),
    ("trainer.lr=fast", "trainer.lr = 'fast': input should be a valid number"),
    ("trainer.lr=nan", "trainer.lr = nan: input should be a finite number"),
    ("trainer.ema_decay=1.0", "trainer.ema_decay = 1.0: input should be less than 1"),
    ("trainer.betas=[0.9]", "trainer.betas.1 is missing"),
    ("trainer={}", "trainer.tile_size is missing"),
    ("trainer=8", "trainer = 8 must be a table with keys such as ranks, parallel"),
    ("rollout.num_groups=-8", "rollout.num_groups = -8: input should be greater than 0"),
    ("run.iterations=1.5", "run.iterations = 1.5: input should be a valid integer"),
    ("run.iterations=true", "run.iterations = True: input should be a valid integer"),
    ('run.seed="7"', "run.seed = '7': input should be a valid integer"),
    ("run.deterministic=1", "run.deterministic = 1: input should be a valid boolean"),
    ("run.name=a/b", "run.name = 'a/b'"),
    ("run.device=gpu", "run.device = 'gpu': did you mean 'cpu'? valid: 'auto', 'cpu', 'cuda'"),
    ("engine.port=70000", "engine.port = 70000: input should be less than or equal to 65535"),
    (
        "sampling.transition.type=sdee",
        "sampling.transition.type = 'sdee': did you mean 'sde'? valid: 'sde', 'cps', 'dance'",
    ),
    ("model.finetune.rank=8", "model.finetune.type is missing; one of: 'full', 'lora'"),
    ("algorithm.type=grpo", "algorithm.type = 'grpo': did you mean 'flow_grpo'? valid: 'flow_grpo'"),
    ("algorithm.type=custom", "algorithm.type = 'custom': valid: 'flow_grpo', 'grpo_guard'"),
    ("rewards=[]", "rewards = []: tuple should have at least 1 item"),
    ('rewards=[{type="ocrr"}]', "rewards.0.type = 'ocrr': did you mean 'ocr'? valid: 'ocr', 'jpeg_size'"),
    ("rewards=[{weight=1.0}]", "rewards.0.type is missing; one of: 'ocr'"),
    ('rewards=[{type="python",path="a b"}]', "rewards.0.path = 'a b'"),
]

COMBINATIONS = [
    (
        'rewards=[{type="diversity"},{type="brightness",weight=0.0}]',
        "rewards: all that have a weight compare the samples of a group, so held-out samples would have no reward",
    ),
    ('watch.gold=[{type="brightness",rank=true}]', "watch.gold: ['brightness'] compare the samples of a group"),
    ('rewards=[{type="ocr"},{type="ocr"}]', "rewards: ['ocr'] appear twice; give them a `name` of their own"),
    (
        "rollout.microgroup_size=3",
        "rollout.microgroup_size = 3 does not divide rollout.group_size = 8; nearest that does: 2",
    ),
    (
        "trainer.steps_per_rollout=3",
        "trainer.steps_per_rollout = 3 does not divide rollout.num_groups = 8; nearest that does: 2",
    ),
    ("trainer.steps_per_rollout=7", "nearest that does: 8"),
    (
        "trainer.tile_size=3",
        "trainer.tile_size = 3 neither divides rollout.microgroup_size = 8 nor is a multiple of it; nearest that fits: 2",
    ),
    ("trainer.tile_size=15", "nearest that fits: 16"),
    ("trainer.ranks=3", "trainer.ranks = 3 does not divide the 8 microgroups of an optimizer step"),
    ("trainer.ranks=3", "nearest that does: 2"),
    ("sampling.steps.high=11", "sampling.steps.high = 11 is past sampling.num_steps = 10"),
    ("sampling.steps.size=7", "sampling.steps.size = 7 does not fit between low = 0 and high = 6"),
    ("sampling.transition.eta=0", "sampling.transition.eta = 0 makes no step stochastic"),
    ('sampling={height=8,width=8,transition={type="cps"}}', "use steps with high = 9"),
    ("algorithm.kl_beta=0.1", "algorithm.reference = adapter_off needs model.finetune.type = lora"),
    (
        'algorithm={type="flow_grpo",kl_beta=0.1,reference={type="ema"}}',
        "algorithm.reference = ema needs trainer.ema_decay",
    ),
    ("eval.weights=ema", "eval.weights = ema needs trainer.ema_decay"),
    ('rewards=[{type="ocr"},{type="ocr"}]', "rewards: ['ocr'] appear twice"),
    ('rewards=[{type="ocr",weight=0}]', "every weight is 0"),
    ("rollout={num_groups=8,group_size=1,microgroup_size=1}", "rollout.group_size = 1"),
    ("trainer.train_text_encoders=true", "trainer.train_text_encoders = true is for SFT"),
]


@pytest.mark.parametrize(("override", "message"), [*KEYS, *VALUES, *COMBINATIONS])
def test_mistakes_are_refused_with_key_value_and_remedy(override, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe(GRPO, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value), "one mistake, one line"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("trainer.parallel.ulysses=2",),
            "trainer.parallel.ulysses = 2 does not divide trainer.ranks = 1; nearest that does: 1",
        ),
        (
            ("trainer.ranks=4", "trainer.parallel={tensor=2, ulysses=2}"),
            "trainer.parallel.tensor = 2 with ring = 1, ulysses = 2: layers are cut over ranks, or tokens are",
        ),
        (
            ("trainer.ranks=2", "trainer.parallel.tensor=2", 'trainer.optimizer={type="adamw_8bit"}'),
            "trainer.parallel.tensor = 2 with trainer.optimizer.type = adamw_8bit",
        ),
        (
            ("engine.parallel.ulysses=2", 'cluster.placement={type="colocated"}'),
            "with engine.parallel an engine stands at 2 places; use cluster.placement.type = separate",
        ),
        (
            ("trainer.ranks=6", "trainer.parallel={ring=3, ulysses=6}"),
            "ring = 3, ulysses = 6; nearest that is: ranks = 18",
        ),
        (
            ("trainer.ranks=8", "trainer.parallel={replicate=2, shard=2}"),
            "replicate = 2, shard = 2, ring = 1, ulysses = 1; nearest that is: ranks = 4",
        ),
        (
            ("trainer.ranks=48", "trainer.parallel.ulysses=4"),
            "trainer.ranks = 48 / 4 ranks of one sequence = 12 does not divide the 8 microgroups",
        ),
    ],
)
def test_degrees_that_do_not_make_up_the_ranks(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(GRPO, overrides)
    assert message in str(caught.value)


def test_ranks_of_one_sequence_share_their_samples() -> None:
    trainer = load_recipe(GRPO, ("trainer.ranks=8", "trainer.parallel={replicate=2, ulysses=2}")).trainer
    assert trainer.data_ranks == 4
    assert [trainer.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


SFT_MISTAKES = [
    (
        "trainer.tile_size=48",
        "trainer.tile_size = 48 does not divide algorithm.batch_size = 128; nearest that does: 32",
    ),
    ("trainer.ranks=2", "trainer.ranks = 2: SFT runs in one process"),
    ("model.dtype=bfloat16", 'model.dtype = "bfloat16"'),
    ("stop.reward_at_most=0.1", "stop.reward_at_most = 0.1 needs a stop.reward_at_least below it"),
    ("rollout.num_groups=8", "rollout = {'num_groups': 8} is not a key of the recipe"),
    ("algorithm.caption_dropot=0.2", "did you mean 'caption_dropout'?"),
]


@pytest.mark.parametrize(("override", "message"), SFT_MISTAKES)
def test_mistakes_in_sft_recipes(override, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe(SFT, [override])
    assert message in str(caught.value)


def test_several_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_recipe(GRPO, ["trainer.lr=-1", "run.seeed=3", "rewards.0.mode=words"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("did you mean 'seed'?" in line for line in lines)


def test_zero_stays_zero():
    recipe = load_recipe(GRPO, ["sampling.guidance_scale=0", "trainer.lr=0", "run.seed=0"])
    assert (recipe.sampling.guidance_scale, recipe.trainer.lr, recipe.run.seed) == (0.0, 0.0, 0)


def test_overrides_are_toml_or_plain_text():
    recipe = load_recipe(
        GRPO,
        [
            "trainer.lr=2e-4",
            "trainer.betas=[0.5, 0.6]",
            "run.name=other",
            "run.deterministic=false",
            "sampling.negative_prompt=a = b, c",
            "sampling.steps.high=5",
            "model.finetune.type=lora",
            "model.finetune.rank=4",
            "rewards.0.mode=scene",
            "cluster.num_cpus=3",
            "trainer.lr=3e-4",
        ],
    )
    assert recipe.trainer.lr == 3e-4
    assert recipe.trainer.betas == (0.5, 0.6)
    assert (recipe.run.name, recipe.run.deterministic, recipe.cluster.num_cpus) == ("other", False, 3)
    assert recipe.sampling.negative_prompt == "a = b, c"
    assert recipe.sampling.steps == s.WindowSteps(size=2, low=0, high=5)
    assert recipe.model.finetune == s.LoraFinetune(rank=4)
    assert recipe.rewards[0].mode == "scene"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lr", "must read section.key=value"),
        ("=3", "must read section.key=value"),
        ("trainer..lr=3", "must read section.key=value"),
        (".lr=3", "must read section.key=value"),
        ("run.name.x=3", "name is a value, not a table"),
        ("rewards.1.weight=1", "1 must be a number below 1"),
        ("rewards.1=1", "1 must be a number below 1"),
        ("rewards.first=1", "first must be a number below 1"),
    ],
)
def test_overrides_that_make_no_sense(override, message):
    with pytest.raises(ConfigError, match="override") as caught:
        load_recipe(GRPO, [override])
    assert message in str(caught.value)
    assert override in str(caught.value)


def test_unreadable_recipes(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml does not exist"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"bad\.toml cannot be read.*line 1"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match="run is missing"):
        load_recipe(tmp_path / "empty.toml")


def test_a_recipe_cannot_be_changed():
    recipe = load_recipe(GRPO)
    with pytest.raises(ValueError, match="frozen"):
        recipe.trainer.lr = 1.0


def test_plan_of_the_demo():
    """8 prompts x 8 samples, a window of 2 steps: 64 samples, 128 pairs, 16 tiles of one microgroup each."""
    plan = batch_plan(load_recipe(GRPO))
    assert (plan.num_groups, plan.group_size, plan.samples, plan.microgroups) == (8, 8, 64, 8)
    assert (plan.trained_steps, plan.pairs) == (2, 128)
    assert (plan.optimizer_steps, plan.pairs_per_optimizer_step, plan.tiles_per_rank) == (1, 128, 16)
    assert plan.exact_ratio


def test_plan_of_several_steps_and_ranks():
    """4 x 6 = 24 samples in 8 microgroups, all 10 steps: 240 pairs; 2 optimizer steps of 120; 60 a rank in tiles of 6."""
    recipe = load_recipe(
        GRPO,
        [
            "rollout={num_groups=4,group_size=6,microgroup_size=3}",
            'sampling.steps={type="all"}',
            "trainer={ranks=2,tile_size=6,steps_per_rollout=2}",
        ],
    )
    plan = batch_plan(recipe)
    assert (plan.samples, plan.microgroups, plan.trained_steps, plan.pairs) == (24, 8, 10, 240)
    assert (plan.optimizer_steps, plan.pairs_per_optimizer_step, plan.tiles_per_rank) == (2, 120, 10)
    assert not plan.exact_ratio


def test_plan_of_random_steps_and_small_tiles():
    """64 samples x 3 steps = 192 pairs over 4 ranks = 48, in tiles of 4 = 12."""
    recipe = load_recipe(
        GRPO, ['sampling.steps={type="random",size=3,low=1,high=9}', "trainer.ranks=4", "trainer.tile_size=4"]
    )
    plan = batch_plan(recipe)
    assert (plan.trained_steps, plan.pairs, plan.tiles_per_rank, plan.exact_ratio) == (3, 192, 12, False)
    assert not batch_plan(load_recipe(GRPO, ["run.deterministic=false"])).exact_ratio


def test_processes_of_a_run():
    recipe = load_recipe(
        GRPO,
        [
            "engine.num=2",
            "rollout.parsers.num=3",
            'rewards=[{type="ocr",workers=2},{type="python",path="a:b",name="mine"}]',
            "trainer.ranks=2",
        ],
    )
    plan = process_plan(recipe)
    assert {p.role: p.count for p in plan} == {
        "engine": 2,
        "trainer": 2,
        "parser": 3,
        "reward:ocr": 2,
        "reward:mine": 1,
    }
    assert all(p.gpus == 0 for p in plan)
    assert {p.role for p in process_plan(recipe, cuda=True) if p.gpus} == {"engine", "trainer"}


def test_a_reward_on_the_gpu_gets_a_sliver_and_one_gpu_still_holds_all():
    rewards = 'rewards=[{type="clip_score",path="clip",device="cuda",workers=2},{type="brightness"}]'
    recipe = load_recipe(GRPO, [rewards])
    gpus = {p.role: p.gpus for p in process_plan(recipe, cuda=True)}
    assert gpus == {
        "engine": 0.499,
        "trainer": 0.499,
        "parser": 0.0,
        "reward:clip_score": 0.001,
        "reward:brightness": 0.0,
    }
    assert sum(p.gpus * p.count for p in process_plan(recipe, cuda=True)) == pytest.approx(1.0)
    assert not any(p.gpus for p in process_plan(recipe))


def test_refusing_a_recipe_needs_nothing_heavy():
    code = f"""
import sys
from pathlib import Path
from verst.config import load_recipe
from verst.config.plan import batch_plan
from verst.errors import ConfigError
batch_plan(load_recipe(Path({str(GRPO)!r})))
try:
    load_recipe(Path({str(GRPO)!r}), ["trainer.learning_rte=1"])
except ConfigError as error:
    print(error)
print(sorted({{"torch", "ray", "diffusers", "transformers", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, heavy = done.stdout.splitlines()
    assert message == "trainer.learning_rte = 1 is not a key of the recipe; did you mean 'lr'?"
    assert heavy == "[]"


def test_every_key_has_a_help_text_or_a_name_that_needs_none():
    """Keys of the shared meaning `type`, and sizes everybody knows; all others say what they are."""
    plain = {"type", "lr", "weight_decay", "adam_epsilon", "quality", "batch_size"}
    sections = [c for c in vars(s).values() if isinstance(c, type) and issubclass(c, s.Section)]
    tables = {"advantage", "reference", "parsers", "clip_high"}
    missing = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, info in section.model_fields.items()
        if not info.description and name not in plain | tables
    ]
    assert missing == []
