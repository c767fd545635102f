"""Prompt files, the order of epochs, and the seeds of samples (CPU-7)."""

import pytest

from verst.errors import PromptError
from verst.flow.noise import derive_seed
from verst.rollout.prompts import PromptSource, read_prompts


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def test_txt_keeps_order_duplicates_and_unicode(tmp_path):
    path = write(tmp_path, "p.txt", "a cat\r\n\nübung\na cat\n")
    prompts = read_prompts(path)
    assert [p.text for p in prompts] == ["a cat", "übung", "a cat"]
    assert [p.index for p in prompts] == [0, 1, 2]


def test_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    assert read_prompts(write(tmp_path, "p.txt", "one\n", "utf-8-sig"))[0].text == "one"


def test_jsonl_and_csv_keep_their_other_columns(tmp_path):
    lines = write(tmp_path, "p.jsonl", '{"prompt": "say \\"hi\\"", "level": 2}\n\n{"prompt": "b"}\n')
    first, second = read_prompts(lines)
    assert (first.text, first.metadata, second.metadata) == ('say "hi"', {"level": 2}, {})
    table = write(tmp_path, "p.csv", 'id,prompt\n1,"a, b"\n2,"two\nlines"\n')
    first, second = read_prompts(table)
    assert (first.text, first.metadata, second.text) == ("a, b", {"id": "1"}, "two\nlines")


BAD = [
    ("e.txt", "\n \n", r"e\.txt holds no prompt"),
    ("e.csv", "prompt\n", r"e\.csv holds no prompt"),
    ("e.csv", "", r"e\.csv:1: no column `prompt`"),
    ("c.csv", "text,id\na,1\n", r"c\.csv:1: no column `prompt` in the header \['text', 'id'\]"),
    ("c.csv", "prompt,id\na,1\nb\n", r"c\.csv:3: the header has 2 columns"),
    ("c.csv", "prompt,id\na,1,2\n", r"c\.csv:2: the header has 2 columns"),
    ("c.csv", 'prompt\n"a" b\n', r"c\.csv:2: "),
    ("j.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"j\.jsonl:2: not JSON"),
    ("j.jsonl", '{"text": "a"}\n', r"j\.jsonl:1: no `prompt` among \['text'\]"),
    ("j.jsonl", '"a"\n', r"j\.jsonl:1: a line must be an object"),
    ("j.jsonl", '{"prompt": 3}\n', r"j\.jsonl:1: `prompt` must be a text, got 3"),
    ("j.jsonl", '{"prompt": " "}\n', r"j\.jsonl:1: `prompt` must be a text"),
    ("p.md", "a\n", r"prompt files end in \.txt, \.jsonl, \.csv"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_files_name_file_and_line(tmp_path, name, text, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(write(tmp_path, name, text))


def test_wrong_encoding_missing_file_and_folder(tmp_path):
    with pytest.raises(PromptError, match=r"l\.txt:2: not UTF-8 \(byte 0xfc\)"):
        read_prompts(write(tmp_path, "l.txt", "ok\nübung\n", "latin-1"))
    with pytest.raises(PromptError, match=r"absent\.txt cannot be read: No such file"):
        read_prompts(tmp_path / "absent.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(PromptError, match="Is a directory"):
        read_prompts(tmp_path / "folder.txt")


def test_a_position_needs_no_history(tmp_path):
    path = write(tmp_path, "p.txt", "".join(f"p{i}\n" for i in range(10)))
    walked = PromptSource(path, seed=3, shuffle=True)
    texts = [walked.at(i).text for i in range(35)]
    for position in (34, 0, 17, 9, 10):
        assert PromptSource(path, seed=3, shuffle=True).at(position).text == texts[position]
    assert len(walked) == 10
    for epoch in range(3):
        assert sorted(texts[10 * epoch : 10 * epoch + 10]) == [f"p{i}" for i in range(10)]
    assert texts[:10] != texts[10:20]
    assert texts[:10] != [PromptSource(path, seed=4, shuffle=True).at(i).text for i in range(10)]
    with pytest.raises(ValueError, match="negative"):
        walked.at(-1)


def test_without_shuffle_the_file_repeats(tmp_path):
    source = PromptSource(write(tmp_path, "p.txt", "a\nb\nc\n"), seed=0, shuffle=False)
    assert [source.at(i).text for i in range(7)] == list("abcabca")


def test_the_order_of_an_epoch_never_changes(tmp_path):
    """Golden: a checkpoint of an older version must resume into the same order."""
    source = PromptSource(write(tmp_path, "p.txt", "0\n1\n2\n3\n4\n5\n6\n7\n"), seed=7, shuffle=True)
    assert "".join(source.at(i).text for i in range(16)) == "6542730126417035"


def test_cpu7_every_sample_has_a_seed_of_its_own_whatever_the_workers():
    def seeds(num_workers):
        found = {}
        for worker in range(num_workers):
            for group in range(worker, 48, num_workers):
                for index in range(16):
                    found[group, index] = derive_seed(7, "sample", 3, group, index)
        return found

    alone = seeds(1)
    assert len(set(alone.values())) == 768
    assert alone == seeds(1) == seeds(2) == seeds(4)
    assert not set(alone.values()) & {derive_seed(8, "sample", 3, g, i) for g in range(48) for i in range(16)}
    assert all(0 <= seed < 2**63 for seed in alone.values())
