"""`eagle-jax convert`."""

import json


def test_there_and_back(command, head, bare_model, tmp_path):
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    code, out, _ = command("convert", head, there, "--to", "speculators", "--verifier", bare_model, "--json")
    assert code == 0
    assert json.loads(out) == {
        "path": there,
        "format": "speculators",
        "method": "eagle3",
        "tensors": 15,
        "notes": json.loads(out)["notes"],
    }
    code, out, err = command("convert", there, back, "--to", "eagle")
    assert code == 0
    assert out == f"{back}: an 'eagle3' head of 15 tensors in the eagle format\n"
    assert bare_model in err
    for folder, form in ((there, "speculators"), (back, "eagle")):
        code, out, _ = command("inspect", folder, "--target", bare_model, "--json")
        report = json.loads(out)
        assert (code, report["format"], report["capture_layers"]) == (0, form, [2, 4, 5])
        assert report["target"] == (bare_model if form == "speculators" else None)


def test_an_output_that_is_there_is_kept(command, head):
    code, _, err = command("convert", head, head, "--to", "eagle")
    assert code == 2
    assert "is not an empty folder" in err
