"""`rookery report`, and the page at the end of a run."""

import shutil

import rookery
from rookery.cli.main import main
from rookery.core.errors import CheckpointError, UsageError


def test_a_finished_run_has_a_page(finished):
    text = (finished / "report" / "index.html").read_text()
    assert text.startswith("<!doctype html>") and "ppo on CartPole-v1" in text and text.rstrip().endswith("</html>")


def test_report_writes_the_page_it_names(run, tmp_path, capsys, monkeypatch):
    (run / "report" / "index.html").unlink()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report" / "index.html")
    assert (run / "report" / "index.html").is_file()
    other = shutil.copytree(run, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out.strip() == "report.html" and (tmp_path / "report.html").is_file()
    assert main(["report", str(run), "--out", str(tmp_path / "deep" / "page.html")]) == 0
    assert (tmp_path / "deep" / "page.html").is_file()


def test_the_same_in_python(run, tmp_path):
    assert rookery.report([run], out=tmp_path / "page.html") == tmp_path / "page.html"
    assert "report" in rookery.__all__


def test_what_is_no_run_is_told(tmp_path, capsys):
    assert main(["report"]) == UsageError.exit_code and "which run" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == CheckpointError.exit_code
