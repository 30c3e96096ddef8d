# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos compare-loss`: what it reads in Megatron's logs, what it says of two, and its exit status."""

from __future__ import annotations

import json

import pytest

from megatron_dos import cli
from megatron_dos.commands import compare_loss


def line(iteration, loss="6.0", skipped=0, more="", grad_norm="1.234"):
    losses = f" lm loss: {float(loss):.6E} |" if loss is not None else ""
    return (
        f" [2026-11-30 10:00:{iteration % 60:02d}.123456] iteration {iteration:8d}/     200 | consumed samples: "
        f"{4 * iteration:12d} | elapsed time per iteration (ms): {100 + 7 * iteration:.1f} | "
        f"learning rate: 1.000000E-03 | global batch size:     4 |{losses}{more} loss scale: 1.0 | "
        f"grad norm: {grad_norm} | "
        f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
    )


@pytest.fixture
def logs(tmp_path):
    """Writes two logs and returns their paths."""

    def write(a, b):
        paths = [tmp_path / "a.log", tmp_path / "b.log"]
        for path, lines in zip(paths, (a, b), strict=True):
            path.write_text("\n".join(lines) + "\n" if not isinstance(lines, str) else lines)
        return [str(path) for path in paths]

    return write


def compare(capsys, paths, *options):
    status = cli.main(["compare-loss", *paths, "--json", *options])
    report = json.loads(capsys.readouterr().out)
    return status, report, {figure["name"]: figure for figure in report["figures"]}


def test_equal_losses_of_runs_that_took_other_times_are_equal(logs, capsys):
    lines = [line(i, 6 - i / 10) for i in range(1, 6)]
    slower = [
        text.replace("elapsed time per iteration (ms): 1", "elapsed time per iteration (ms): 9") for text in lines
    ]
    status, report, figures = compare(capsys, logs(lines, slower), "--tolerance", "0")
    assert (status, report["compared"]) == (0, 5)
    assert (figures["lm loss"]["largest"], figures["lm loss"]["first"]) == (0, None)
    assert not any("time" in name for name in figures)


def test_largest_differences_and_first_ones(logs, capsys):
    a = [line(i, "5.0") for i in range(1, 11)]
    b = [line(i, {4: "5.0005", 7: "5.2", 9: "5.1"}.get(i, "5.0")) for i in range(1, 11)]
    paths = logs(a, b)
    status, _, figures = compare(capsys, paths)
    loss = figures["lm loss"]
    assert status == 1
    assert (loss["largest"], loss["largest_at"]) == (pytest.approx(0.2), 7)
    assert (loss["largest_relative"], loss["largest_relative_at"]) == (pytest.approx(0.04), 7)
    assert (loss["first"], loss["beyond"]) == (4, 7)
    assert compare(capsys, paths, "--tolerance", "0.05")[0] == 0
    assert cli.main(["compare-loss", *paths]) == 1
    page = capsys.readouterr().out
    assert "0.2 at 7" in page
    assert page.splitlines()[-1].startswith("NOT within the tolerance of 0.005: lm loss from iteration 7 on")
    assert max(map(len, page.splitlines())) <= 120


def test_all_losses_are_compared_and_grad_norms_only_shown(logs, capsys):
    mtp = " mtp_1 loss: {:.6E} | load_balancing_loss: 1.1E+00 |"
    a = [line(i, more=mtp.format(7.0)) for i in (1, 2)]
    b = [line(i, more=mtp.format(7.0 if i == 1 else 8.0), grad_norm="9.999") for i in (1, 2)]
    status, _, figures = compare(capsys, logs(a, b))
    assert status == 1
    assert figures["mtp_1 loss"]["beyond"] == 2
    assert figures["lm loss"]["beyond"] is figures["load_balancing_loss"]["beyond"] is None
    assert figures["grad norm"]["largest"] == pytest.approx(8.765)
    assert not figures["grad norm"]["judged"]
    assert not figures["loss scale"]["loss"]


def test_output_of_other_ranks_colours_and_a_cut_end_are_passed_over(logs, capsys):
    clean = [line(i, 6 - i / 10) for i in range(1, 5)]
    noisy = [
        "[rank0]: [before the start of training step] datetime: 2026-11-30 10:00:00",
        "\x1b[32m[default1]:" + clean[0] + "\x1b[0m",
        "deep optimizer states, iteration 1: update 3.0 ms",
        clean[1] + clean[2],  # run together
        clean[2],  # from another stream
        "2026-11-30T10:00:04Z stdout F " + clean[3] + "\r",
        line(5, "4.0")[:210],
    ]
    status, report, figures = compare(capsys, logs(clean, "\n".join(noisy)), "--tolerance", "0")
    assert (status, report["compared"], report["b"]["only"]) == (0, 4, [])
    assert figures["lm loss"]["first"] is None
    assert "a line of iteration 5 is cut short" in report["notes"][0]


def test_loss_that_is_nan_is_beyond_any_tolerance(logs, capsys):
    """Megatron prints no such loss; old ones print nan."""
    a = [line(i) for i in (1, 2, 3)]
    for b in ([line(1), line(2, None), line(3)], [line(1), line(2).replace("6.000000E+00", "nan"), line(3)]):
        status, _, figures = compare(capsys, logs(a, b), "--tolerance", "1e9")
        assert status == 1
        assert (figures["lm loss"]["largest"], figures["lm loss"]["beyond"]) == ("infinite", 2)
    assert compare(capsys, logs(b, b), "--tolerance", "0")[0] == 0


def test_skipped_iterations_have_to_be_the_same(logs, capsys):
    a, b = [line(i) for i in (1, 2)], [line(1), line(2, skipped=1)]
    status, _, figures = compare(capsys, logs(a, b))
    assert status == 1
    assert figures["number of skipped iterations"]["beyond"] == 2


def test_averages_over_other_iterations_are_left_out(logs, capsys):
    """The second line of a resumed run averages two iterations, which the whole run's line does not."""
    whole = [line(i, "5.0") for i in range(1, 7)]
    resumed = [line(4, "5.0"), line(5, "7.0"), line(6, "5.0")]
    status, report, figures = compare(capsys, logs(whole, resumed))
    assert (status, report["averaged_differently"]) == (0, [5])
    assert report["a"]["only"] == [1, 2, 3]
    assert figures["lm loss"]["compared"] == 2
    appended = [*whole[:3], "[before the start of training step] datetime: x", *resumed]
    assert compare(capsys, logs(whole, appended))[1]["averaged_differently"] == [5]
    # Both second lines average the same two: compared.
    assert compare(capsys, logs(whole, [line(1, "5.0"), line(2, "7.0")]))[0] == 1


def test_without_regard_to_averages_a_resumed_run_seems_to_differ(logs, capsys, monkeypatch):
    """The proof that the test above would notice."""
    read = compare_loss.read_log

    def every_line_for_itself(path):
        log = read(path)
        log.windows = {iteration: iteration for iteration in log.values}
        return log

    monkeypatch.setattr(compare_loss, "read_log", every_line_for_itself)
    with pytest.raises(AssertionError):
        test_averages_over_other_iterations_are_left_out(logs, capsys)


def test_iteration_that_is_logged_again_counts_the_last_time(logs, capsys):
    a = [line(i, "5.0") for i in (1, 2, 3, 4)]
    b = [line(1, "5.0"), line(2, "5.0"), line(3, "9.0"), line(3, "5.0"), line(4, "5.0")]
    _, report, figures = compare(capsys, logs(a, b))
    assert "iteration 3 logged more than once" in report["notes"][0]
    assert figures["lm loss"]["largest"] == 0


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([line(1)], ["no such line"], "no complete log line"),
        ([line(1)], [line(2)], "no iteration in common: 1 to 1 and 2 to 2"),
        ([line(1, None)], [line(1, None)], "no loss in common"),
    ],
)
def test_logs_without_anything_to_compare_are_status_2(logs, capsys, a, b, words):
    assert cli.main(["compare-loss", *logs(a, b)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_missing_file_and_bad_tolerance_are_status_2(logs, capsys):
    paths = logs([line(1)], [line(1)])
    assert cli.main(["compare-loss", paths[0], "/nowhere/b.log"]) == 2
    assert "/nowhere/b.log cannot be read" in capsys.readouterr().err
    for value in ("-1", "nan", "inf", "much"):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["compare-loss", *paths, f"--tolerance={value}"])
        assert exit_.value.code == 2


def test_picture(logs, capsys, tmp_path, monkeypatch):
    paths, picture = logs([line(1), line(2)], [line(1), line(2, "6.1")]), tmp_path / "loss.png"
    assert cli.main(["compare-loss", *paths, "--plot", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["compare-loss", *paths, "--plot", str(picture)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main(["compare-loss", *paths, "--plot", str(picture), "--overwrite"]) == 1
    monkeypatch.setattr(compare_loss.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["compare-loss", *paths, "--plot", str(tmp_path / "other.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
