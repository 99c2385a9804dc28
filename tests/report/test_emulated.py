"""The page of what the Triton kernels gave in the emulator."""

from bnrnn.report import emulated_page
from bnrnn.system.files import read_record

ROW = {"case": "BN-LSTM padded, 6 x 9", "architecture": 80, "precision": "float32", "launch": "steps", "programs": 2,
       "instructions": 12345, "error": 1.2e-6, "tolerance": 1e-5, "conflicts": []}  # fmt: skip


def test_the_pages_count_cases_errors_and_conflicts():
    bad = ROW | {"precision": "tf32", "error": 0.5, "tolerance": 1e-2, "conflicts": ["one", "two"]}
    other = ROW | {"case": "BN-RHN, 6 x 9", "architecture": 90, "error": 2e-6}
    cost = {"case": "BN-LSTM, 64 x 100", "precision": "tf32", "launch": "steps", "kernel": "forward_steps",
            "programs": 7, "warps": 8, "instructions": 3400, "barriers": 17, "bytes": 2048}  # fmt: skip
    result = {"triton": "3.7.1", "date": "today", "rows": [ROW, bad, other], "costs": [cost]}
    page, brief = emulated_page.render(result), emulated_page.render_brief(result)
    assert "| BN-LSTM padded, 6 x 9 | sm_80 | float32 | steps | 2 | 12,345 | 1.2e-06 | 1.0e-05 | 0 |" in page
    assert "## Conflicts\n\n- one\n- two\n" in page
    assert "## Conflicts" not in emulated_page.render(result | {"rows": [ROW]})
    assert "| BN-LSTM | sm_80 | 2 | 24,690 | 1.2e-06 | 5.0e-01 | – | 2 |" in brief
    assert "| BN-RHN | sm_90 | 1 | 12,345 | 2.0e-06 | – | – | 0 |" in brief
    assert "2 of 3 cases passed. Triton 3.7.1, today." in page and "2 of 3 cases passed." in brief
    # 3400 instructions of 8 warps on 4 schedulers, and 17 barriers: 7140 cycles at 1.7 GHz
    assert "| BN-LSTM, 64 x 100 | tf32 | steps | forward_steps | 7 | 8 | 3,400 | 17 | 2 | 4.2 to 19.4 |" in page
    times = emulated_page.render_times(result)
    assert "| BN-LSTM, 64 x 100 | tf32 | steps | forward_steps | 4.2 to 19.4 |" in times


def test_the_page_of_a_gpu_has_its_errors_beside_those_of_the_emulator():
    row = {"case": ROW["case"], "precision": "float32", "launch": "steps", "error": 4.5e-7, "tolerance": 1e-5,
           "passed": True, "problem": ""}  # fmt: skip
    wrong = row | {"case": "LSTM, 6 x 5", "precision": "tf32", "error": None, "passed": False}
    failed = wrong | {"problem": "OutOfResources: shared memory"}
    where = {"hardware": "NVIDIA H100", "torch": "2.11.0"}
    result = {"triton": "3.6.0", "date": "today", "commit": "abc", "environment": where, "rows": [row, wrong, failed]}
    page = emulated_page.render_executed(result, {"rows": [ROW, ROW | {"error": 2.5e-6, "architecture": 90}]})
    assert "| BN-LSTM padded, 6 x 9 | float32 | steps | 4.5e-07 | 1.0e-05 | 2.5e-06 |" in page
    assert "| LSTM, 6 x 5 | tf32 | steps | NaN | 1.0e-05 | – |" in page
    assert "| LSTM, 6 x 5 | tf32 | steps | OutOfResources: shared memory | 1.0e-05 | – |" in page
    assert "1 of 3 cases passed. NVIDIA H100, torch 2.11.0, Triton 3.6.0, today, commit abc." in page
    brief = emulated_page.render_executed_brief(result)
    assert "| BN-LSTM | 1 | 4.5e-07 | – | – |\n| LSTM | 2 | – | failed | – |" in brief


def test_an_estimated_time_is_at_least_that_of_the_bytes():
    cost = {"instructions": 100, "warps": 4, "barriers": 0, "bytes": 64 * 1700 * 10}
    low, high = emulated_page.estimate(cost)
    assert low == 10 and high == (800 + 5000 + 4 * 17000) / 1700


def test_the_page_counts_damage_and_gives_the_reason_for_what_was_not_noticed():
    row = {"where": "forward_steps, sm_90", "what": "3:  bar.sync 0", "line": "a.py:7", "change": "deleted",
           "noticed": "Fault: read after write", "reason": ""}  # fmt: skip
    missed = row | {"change": "later", "noticed": "", "reason": "it has no effect"}
    source = {"where": "b.py", "what": "x + 1", "line": "b.py:3", "change": "x + 2", "noticed": "error", "reason": ""}
    made = {"triton": "3.7.1", "date": "today"}
    damage = {"order": made | {"rows": [row, row, missed]}, "source": made | {"rows": [source]}}
    page = emulated_page.render({"triton": "3.7.1", "date": "today", "rows": [], "costs": [], "damage": damage})
    assert "| order | forward_steps, sm_90 | deleted | 2 | 2 |" in page
    assert "| order | forward_steps, sm_90 | later | 0 | 1 |" in page
    assert "| source | b.py | changed | 1 | 1 |" in page
    assert "- `forward_steps, sm_90`, a.py:7, `3: bar.sync 0`, later: it has no effect\n" in page
    brief = emulated_page.render_brief({"triton": "3.7.1", "date": "today", "rows": [], "costs": [], "damage": damage})
    assert "- Damage to barriers, fences and waits: 2 of 3 were noticed.\n" in brief
    assert "- Damage to lines of the kernels' source: 1 of 1 were noticed.\n" in brief
    only = emulated_page.render_damage({"source": damage["source"]})
    assert only.endswith("Not noticed:\n\nnothing\n")


def test_of_the_stored_damage_to_the_order_95_percent_were_noticed_and_all_of_the_rest_is_explained():
    damage = read_record(emulated_page.FILE, "make emulate")["damage"]
    missed = {kind: [row for row in of["rows"] if not row["noticed"]] for kind, of in damage.items()}
    assert len(damage["order"]["rows"]) > 300 and len(damage["source"]["rows"]) > 40
    assert len(missed["order"]) <= 0.05 * len(damage["order"]["rows"])
    assert all(row["reason"] for rows in missed.values() for row in rows)
