"""`rookery export`: where the file goes and what is shown."""

import re

import gymnasium
import numpy as np
import onnxruntime

import rookery
from rookery.cli.main import main


def test_a_policy_is_exported_and_plays_without_rookery(run, capsys):
    assert main(["export", str(run)]) == 0
    shown = capsys.readouterr().out
    (path,) = (run / "export").iterdir()
    assert path.name == f"{rookery.load(run).path.name}.onnx" and str(path) in shown
    assert re.search(r"input obs +float32 \[batch, 4\]", shown) and re.search(r"output action +int64 \[batch\]", shown)
    assert "160 random observations: the same actions as the policy's" in shown
    env, session, policy = gymnasium.make("CartPole-v1"), onnxruntime.InferenceSession(str(path)), rookery.load(run)
    obs, _ = env.reset(seed=1)
    for _ in range(20):
        action = session.run(["action"], {"obs": obs[None].astype(np.float32)})[0][0]
        assert action == policy.predict(obs)[0]
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()


def test_the_file_and_the_checkpoint_can_be_chosen(run, tmp_path, capsys):
    (checkpoint,) = (run / "checkpoints").iterdir()
    out = tmp_path / "new" / "policy.pt2"
    assert main(["export", str(checkpoint), "--format", "torch", "--out", str(out)]) == 0
    assert out.is_file() and not (run / "export").exists()
    assert main(["export", str(run), "--out", str(out)]) == 2
    assert "a file of format 'onnx' ends in .onnx" in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == 6


def test_a_link_in_a_run_folder_is_not_followed(run, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (run / "export").symlink_to(tmp_path / "elsewhere")
    assert main(["export", str(run), "--format", "torch"]) == 7
    assert "it is a symbolic link" in capsys.readouterr().err and not list((tmp_path / "elsewhere").iterdir())
