"""Kind G, pictures: positions per document, images found by their own index, towers that every rank enters."""

import pytest
import torch
from kit import Question, ask, check, oracle

from longspan.data import Row, Sample, pack
from longspan.models.loading import load_model
from longspan.parity.samples import fill_fields
from longspan.parity.sweep_examples import Row as Made
from longspan.parity.sweep_examples import make_sample

VL = "tiny:qwen3_vl"


def pictured(*images: tuple[tuple[int, int, int], ...], text: int = 9, first: int = 1) -> list[Sample]:
    """Rows with these images: (text tokens before it, height, width in visual tokens)."""
    made = [make_sample(Made(text + n, 3, 0.0, True, shapes, 0, seed=first + n)) for n, shapes in enumerate(images)]
    return fill_fields(made, oracle(VL))


ONE, NONE = ((2, 2, 3),), ()
MIXED = pictured(ONE, NONE, ((1, 1, 2), (3, 2, 2)))
COUNTS = pictured(NONE, ((1, 2, 2),), ((0, 1, 1), (1, 1, 2), (1, 2, 1)), ((2, 1, 3), (0, 2, 2)))
ACROSS = pictured(((4, 3, 4),), text=12)  # 12 visual tokens over the middle of 26
LATE = pictured(((11, 2, 3),), text=12)  # rank 0 encodes the only image, rank 1 holds its tokens
QUESTIONS = {
    "g1": Question(MIXED, model=VL, layouts=("dp2", "cp2-ulysses"), fault="positions-mrope"),
    "g10": Question(COUNTS, model=VL, layouts=("dp2", "cp2-gather", "cp2-ulysses"), fault="media-rows"),
    "g10 shuffled": Question([COUNTS[n] for n in (3, 0, 2, 1)], model=VL, layouts=("dp2", "cp2-ring")),
    "g12 one image": Question(LATE, model=VL, layouts=("dp2", "cp2-ulysses"), fault="vision-gradient"),
    "g12 no image": Question(pictured(NONE, NONE), model=VL, layouts=("dp2", "cp2-ulysses")),
    "g14": Question(ACROSS, model=VL, layouts=("cp2-ulysses-contiguous", "cp2-ring-zigzag"), fault="vision-gradient"),
}
FOUR = {
    "g12 one image on four": Question(pictured(ONE, NONE), model=VL, layouts=("cp4-ulysses", "dp4")),
}


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS) | ask(FOUR, ranks=4)


def test_g1_packed_positions_are_each_rows_own(answers):
    check("g1", QUESTIONS, answers)


def test_g2_positions_of_a_later_row_start_again():
    """The third row of a pack has the positions that it has alone, from 0; no mask is read for them."""
    adapter, _ = load_model(VL)
    tensors = [dict(adapter.sample_tensors(sample), input_ids=sample.input_ids) for sample in MIXED]
    declared = {name: spec for name, spec in adapter.declared().items() if name == "position"}
    lengths = [len(sample) for sample in MIXED]
    stream = pack(Row((0, 1, 2), 0, 1), [{"position": row["position"]} for row in tensors], declared, "contiguous")
    third = stream.fields["position"][:, sum(lengths[:2]) :]
    assert third[:, 0].tolist() == [0, 0, 0] and torch.equal(third, tensors[2]["position"])
    control = torch.arange(sum(lengths)).expand(3, -1)[:, sum(lengths[:2]) :]
    assert not torch.equal(third, control)


@pytest.mark.parametrize("name", ["g10", "g10 shuffled"])
def test_g10_images_are_counted_by_image_not_by_row(name, answers):
    """Rows with 0, 1, 3 and 2 images in two orders and any micro-steps."""
    check(name, QUESTIONS, answers)


@pytest.mark.parametrize("name", ["g12 one image", "g12 no image", "g12 one image on four"])
def test_g12_every_rank_enters_the_tower_and_gradients_are_summed(name, answers):
    found = check(name, QUESTIONS | FOUR, answers)
    tower = [float(g.abs().max()) for own in found.values() for n, g in own.gradients.items() if ".visual." in n]
    assert tower and (max(tower) > 0) == ("one" in name)


def test_g14_an_image_across_the_edge_and_a_tower_of_three_heads(answers):
    """The tower has 3 heads where the text has 4: it is never cut by them. The image is cut at both indices."""
    config = oracle(VL).model.config
    assert (config.vision_config.num_heads, config.get_text_config().num_attention_heads) == (3, 4)
    places = (ACROSS[0].input_ids == 93).nonzero()[:, 0]
    middle = len(ACROSS[0]) // 2
    assert int(places[0]) < middle <= int(places[-1])
    check("g14", QUESTIONS, answers)
