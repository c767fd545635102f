"""Rewards behind HTTP, against real servers on this machine: what is sent, what is read, and what goes wrong."""

import asyncio
import base64
import functools
import io
import json
import math
import threading
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from verst.config import parse_recipe
from verst.config.rewards import FrameChoice, FramesConfig, HttpReward, OpenaiReward
from verst.errors import ConfigError, RewardError
from verst.rewards import RewardBatch, make_reward
from verst.rewards.calls import attempt, score_with_policy
from verst.rewards.preflight import check_rewards
from verst.rewards.service import retry_after_s


@contextmanager
def serving(answer):
    """answer: (number of the request from 0, its headers, its body) -> Response; or a coroutine of one."""
    seen = []

    async def handle(request):
        body = await request.body()
        seen.append((dict(request.headers), body, request.url.path))
        made = answer(len(seen) - 1, *seen[-1][:2])
        return await made if asyncio.iscoroutine(made) else made

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=0))
    sock = server.config.bind_socket()
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", seen
    finally:
        server.should_exit = True
        thread.join(timeout=30)


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def said(status=200, **others):
    headers = others.pop("headers", None)
    return Response(json.dumps(others), status, headers=headers, media_type="application/json")


def batch_of(frames=1, **others):
    values = torch.arange(2, dtype=torch.uint8)[:, None] * 100 + torch.arange(frames, dtype=torch.uint8)
    media = values[:, :, None, None, None].expand(2, frames, 4, 6, 3).contiguous()
    return RewardBatch(media=media, prompts=("a", "b"), metadata=({"n": 1}, {}), **others)


def scored(config, batch=None, backoff_s=0.0):
    """As a run does it."""
    reward = make_reward(config)

    async def call(asked):
        return await asyncio.to_thread(reward.score, asked)

    return asyncio.run(
        score_with_policy(
            functools.partial(attempt, call, timeout_s=config.timeout_s),
            batch or batch_of(),
            name="judge",
            attempts=config.attempts,
            on_failure=config.on_failure,
            backoff_s=backoff_s,
        )
    )


@pytest.mark.parametrize("form", ["json_png", "json_npy", "msgpack"])
def test_a_service_gets_the_whole_batch(form):
    batch = batch_of(frames=2, fps=8.0, audio=torch.full((2, 1, 5), 0.5), sample_rate=100)
    with serving(lambda *_: said(scores=[0.25, 1])) as (url, seen):
        assert scored(HttpReward(url=url, format=form), batch).values == (0.25, 1.0)
    headers, body, _ = seen[0]
    if form == "msgpack":
        assert headers["content-type"] == "application/msgpack"
        sent = msgpack.unpackb(body)
        media, audio = sent["media"], sent["audio"]
    else:
        sent = json.loads(body)
        audio = base64.b64decode(sent["audio"])
    if form == "json_png":
        clips = [[Image.open(io.BytesIO(base64.b64decode(frame))) for frame in clip] for clip in sent["media"]]
        array = np.stack([np.stack([np.asarray(frame) for frame in clip]) for clip in clips])
    else:
        array = np.load(io.BytesIO(media if form == "msgpack" else base64.b64decode(sent["media"])))
    assert np.array_equal(array, batch.media.numpy())
    assert np.array_equal(np.load(io.BytesIO(audio)), batch.audio.numpy())
    assert (sent["prompts"], sent["metadata"]) == (["a", "b"], [{"n": 1}, {}])
    assert (sent["fps"], sent["sample_rate"]) == (8.0, 100)


def test_a_service_may_answer_msgpack_and_judge_single_frames():
    def answer(number, headers, body):
        scores = [
            float(np.asarray(Image.open(io.BytesIO(base64.b64decode(c[0]))))[0, 0, 0])
            for c in json.loads(body)["media"]
        ]
        return Response(msgpack.packb({"scores": scores}), media_type="application/msgpack")

    with serving(answer) as (url, _):
        frames = FramesConfig(policy="all", reduce="max")
        assert scored(HttpReward(url=url, frames=frames), batch_of(frames=3)).values == (2.0, 102.0)


def test_headers_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_AUTH", "Bearer of secrets")
    with serving(lambda *_: said(scores=[1, 1])) as (url, seen):
        scored(HttpReward(url=url, headers_env={"Authorization": "JUDGE_AUTH"}))
    assert seen[0][0]["authorization"] == "Bearer of secrets"


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_service_is_asked_again(status):
    def answer(number, *_):
        return said(status, error="busy") if number < 2 else said(scores=[0.5, 0.5])

    with serving(answer) as (url, seen):
        result = scored(HttpReward(url=url))
    assert (result.values, result.num_attempts, len(seen)) == ((0.5, 0.5), 3, 3)


def test_a_service_that_stays_broken_stops_or_masks():
    with serving(lambda *_: said(500, error="out of memory")) as (url, seen):
        with pytest.raises(RewardError, match=r"judge failed 3 times, last: http.* answered 500: .*out of memory"):
            scored(HttpReward(url=url))
        assert len(seen) == 3
        masked = scored(HttpReward(url=url, on_failure="mask", attempts=1))
    assert all(map(math.isnan, masked.values))
    assert masked.num_failures == 2


def test_what_a_service_refuses_is_not_asked_again():
    with serving(lambda *_: said(401, error="no such key")) as (url, seen):
        with pytest.raises(RewardError, match=r"judge failed for good, last: .*answered 401: .*no such key"):
            scored(HttpReward(url=url))
        assert len(seen) == 1


def test_retry_after_is_waited_for(monkeypatch):
    pauses = []

    async def noted(seconds):
        pauses.append(seconds)

    def answer(number, *_):
        return said(429, headers={"Retry-After": "17"}) if number == 0 else said(scores=[1, 1])

    monkeypatch.setattr("verst.rewards.calls.sleep", noted)
    with serving(answer) as (url, _):
        scored(HttpReward(url=url))
    assert pauses == [17.0]
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", now=18.0) == 42.0
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", now=99.0) == 0.0
    assert retry_after_s("soon", now=0.0) == retry_after_s(None, now=0.0) == 0.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"scores": [1.0]}, "gave 1 scores for 2 samples"),
        ({"result": [1.0, 1.0]}, r'not of the form \{"scores"'),
        ({"scores": ["good", "bad"]}, "'bad' is no score"),
        ({"scores": [True, True]}, "True is no score"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(body, message):
    with serving(lambda *_: said(**body)) as (url, _), pytest.raises(RewardError, match=message):
        scored(HttpReward(url=url, attempts=2))


def test_scores_that_are_not_finite_are_masked_and_counted():
    answer = Response('{"scores": [NaN, Infinity]}', media_type="application/json")
    with serving(lambda *_: answer) as (url, seen):
        result = scored(HttpReward(url=url))
    assert all(map(math.isnan, result.values))
    assert (result.num_non_finite, result.num_failures, len(seen)) == (2, 0, 1)


def test_garbage_silence_and_nobody_are_failures():
    async def silent():
        await asyncio.sleep(60)

    with (
        serving(lambda *_: Response("<html>\x00")) as (url, _),
        pytest.raises(RewardError, match="neither JSON nor msgpack: <html>"),
    ):
        scored(HttpReward(url=url, attempts=1))
    with (
        serving(lambda *_: silent()) as (url, _),
        pytest.raises(RewardError, match=r"ReadTimeout|no answer within 0\.2 s"),
    ):
        scored(HttpReward(url=url, attempts=1, timeout_s=0.2))
    with pytest.raises(RewardError, match="ConnectError"):
        scored(HttpReward(url=url, attempts=2))


def test_a_service_may_fail_single_samples():
    def answer(number, headers, body):
        if number == 0:
            return said(scores=[{"error": "unreadable"}, 0.75])
        assert json.loads(body)["prompts"] == ["a"]
        return said(scores=[None])

    with serving(answer) as (url, _):
        result = scored(HttpReward(url=url))
    assert math.isnan(result.values[0])
    assert (result.values[1], result.num_failures, result.num_non_finite) == (0.75, 0, 1)


@pytest.fixture
def rubric(tmp_path):
    path = tmp_path / "rubric.txt"
    path.write_text('Does the picture show "{prompt}"? Answer {"score": 0..10}.')
    return path


def verdict(text, **others):
    return said(choices=[{"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **others}])


def test_a_judge_sees_rubric_and_frames(rubric, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k-1")

    def answer(number, headers, body):
        prompt = json.loads(body)["messages"][0]["content"][0]["text"].split('"')[1]
        return verdict(json.dumps({"reason": "so", "score": {"a": 4, "b": 9.5}[prompt]}))

    with serving(answer) as (url, seen):
        config = OpenaiReward(
            base_url=url + "/v1",
            model="eye",
            rubric=rubric,
            api_key_env="JUDGE_KEY",
            score_range=(-1.0, 10.0),
            frames=FrameChoice(policy="uniform", count=2),
            extra={"seed": 3},
        )
        assert scored(config, batch_of(frames=4)).values == pytest.approx((5 / 11, 10.5 / 11))
    headers, body, path = seen[0]
    sent = json.loads(body)
    assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer k-1")
    assert (sent["model"], sent["temperature"], sent["seed"]) == ("eye", 0.0, 3)
    schema = sent["response_format"]["json_schema"]["schema"]["properties"]["score"]
    assert (schema["minimum"], schema["maximum"]) == (-1.0, 10.0)
    text, *pictures = sent["messages"][0]["content"]
    assert text["text"] in {f'Does the picture show "{p}"? Answer {{"score": 0..10}}.' for p in "ab"}
    first = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(p["image_url"]["url"].split(",")[1]))))[0, 0, 0]
        for p in pictures
    ]
    assert [value % 100 for value in first] == [1, 3]


@pytest.mark.parametrize(
    ("structured", "text", "expected"),
    [
        (True, '{"reason": "r", "score": 10}', 1.0),
        (False, "5", 0.5),
        (False, " Score: 2.5\n", 0.25),
        (True, '{"score": 11}', r"score 11 is outside of score_range = \[0, 10\]"),
        (True, '{"score": "7"}', "no score can be read"),
        (True, '{"score": true}', "no score can be read"),
        (True, '{"score": NaN}', "no score can be read"),
        (True, "I would say 7", "no score can be read.*I would say 7"),
        (True, "[7]", "no score can be read"),
        (False, "7 out of 10", "no score can be read"),
        (False, "-1", "score -1 is outside"),
        (False, "", "no score can be read"),
    ],
)
def test_a_judges_answer_is_a_score_or_a_failure(rubric, structured, text, expected):
    with serving(lambda *_: verdict(text)) as (url, seen):
        config = OpenaiReward(base_url=url, model="eye", rubric=rubric, structured=structured, attempts=2)
        if isinstance(expected, float):
            assert scored(config).values == (expected, expected)
            assert ("response_format" in json.loads(seen[0][1])) == structured
        else:
            with pytest.raises(RewardError, match=expected):
                scored(config)
            assert len(seen) == 4  # asked again, both samples


def test_a_judge_that_fails_one_sample_is_asked_about_that_alone(rubric):
    asked = []

    def answer(number, headers, body):
        prompt = json.loads(body)["messages"][0]["content"][0]["text"].split('"')[1]
        asked.append(prompt)
        return verdict("{}") if prompt == "b" else verdict('{"score": 5}')

    with serving(answer) as (url, _):
        result = scored(OpenaiReward(base_url=url, model="eye", rubric=rubric, on_failure="mask"))
    assert result.values[0] == 0.5
    assert math.isnan(result.values[1])
    assert (result.num_failures, asked.count("a"), asked.count("b")) == (1, 1, 3)


def test_a_judge_that_refuses_cuts_off_or_is_no_judge(rubric):
    for response, message in (
        (said(404, error="no such model"), "for good, last: .*answered 404"),
        (verdict('{"reason": "wel', finish_reason="length"), "cut off; raise rewards.max_tokens"),
        (said(hello=1), "no chat completion"),
        (verdict(None), "has no text"),
    ):
        with serving(lambda *_, r=response: r) as (url, _), pytest.raises(RewardError, match=message):
            scored(OpenaiReward(base_url=url, model="eye", rubric=rubric, attempts=1))


def test_no_more_requests_at_a_time_than_allowed(rubric):
    now, most = 0, 0

    async def slow():
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return verdict('{"score": 5}')

    media = torch.zeros(8, 1, 4, 4, 3, dtype=torch.uint8)
    with serving(lambda *_: slow()) as (url, seen):
        config = OpenaiReward(base_url=url, model="eye", rubric=rubric, concurrency=3)
        assert scored(config, RewardBatch.plain(media, ["x"] * 8)).values == (0.5,) * 8
    assert len(seen) == 8
    assert most <= 3


def test_what_is_missing_is_said_before_anything_loads(tmp_path, rubric, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = {"base_url": "http://127.0.0.1:1", "model": "eye", "rubric": rubric}
    wrong = [
        (HttpReward(url="http://x", headers_env={"A": "NO_SUCH_KEY"}), r"reward http: headers_env\.A = 'NO_SUCH_KEY'"),
        (OpenaiReward(**judge, api_key_env="NO_SUCH_KEY"), r"reward openai: api_key_env = 'NO_SUCH_KEY'.*not set"),
        (OpenaiReward(**(judge | {"rubric": tmp_path / "absent.txt"})), r"absent.txt.*cannot be read"),
    ]
    for config, message in wrong:
        with pytest.raises(ConfigError, match=message):
            check_rewards([config], [], [])
        with pytest.raises(ConfigError, match=r"NO_SUCH_KEY|absent"):
            make_reward(config)
    check_rewards([OpenaiReward(**judge)], [], [])
    rubric.write_text("How good is it?")
    with pytest.raises(ConfigError, match=r"has no \{prompt\}"):
        check_rewards([OpenaiReward(**judge)], [], [])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"score_range": [10.0, 0.0]}, r"score_range = \[10, 0\] must go from the lowest"),
        ({"request_timeout_s": 500.0}, "request_timeout_s = 500 is more than rewards.timeout_s = 120"),
        ({"api_key_env": "sk-123 secret"}, "api_key_env"),
        ({"base_url": "127.0.0.1"}, "base_url"),
    ],
)
def test_wrong_settings_of_a_judge_are_refused(keys, message):
    judge = {"type": "openai", "base_url": "http://127.0.0.1:1", "model": "eye", "rubric": "r.txt"}
    with pytest.raises(ConfigError, match=message):
        parse_recipe({"rewards": [{**judge, **keys}]})
