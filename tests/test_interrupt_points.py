"""What the handler of a signal raises comes out as itself, wherever it strikes in our code."""

from __future__ import annotations

import sys

import pytest

from tests.integration.programs import succeed

STRIKES = """
import dis, io, os, signal, sys, time
import torch, skyproxy

PLACE = os.path.dirname(skyproxy.__file__)

class Struck(TimeoutError, KeyError, ValueError, OverflowError, RuntimeError):
    '''Whatever a clause of ours may be looking for.'''

def places_of(code):
    '''Where CPython looks for signals: after a call, where a function begins, and where a loop goes back.'''
    found, before = set(), None
    for instruction in dis.get_instructions(code):
        if before in ("RESUME", "CALL", "CALL_FUNCTION_EX"):
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        before = instruction.opname
    return found

class Striker:
    '''Raises once in each run of a program, at a place where it has not raised before.'''

    def __init__(self):
        self.places, self.seen, self.struck_at = {}, set(), None
        self.began_python = {}  # frames and where they called a Python function: no signal is looked for after that

    def trace(self, frame, event, argument):
        if event == "call":
            if frame.f_back is not None:
                self.began_python[id(frame.f_back)] = frame.f_back.f_lasti
            self.began_python.pop(id(frame), None)
            if not frame.f_code.co_filename.startswith(PLACE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and self.struck_at is None:
            code, at = frame.f_code, frame.f_lasti
            if code not in self.places:
                self.places[code] = places_of(code)
            if at in self.places[code] and self.began_python.pop(id(frame), at) >= at and (code, at) not in self.seen:
                self.seen.add((code, at))
                self.struck_at = f"{code.co_filename[len(PLACE):]}:{frame.f_lineno} in {code.co_qualname}"
                signal.raise_signal(signal.SIGUSR1)
        return self.trace

    def run(self, program):
        '''Return False once there is no place left.'''
        before, self.struck_at, problem = len(self.seen), None, "it was swallowed"
        try:
            sys.settrace(self.trace)
            try:
                program()
            finally:
                sys.settrace(None)
            until = time.monotonic() + 1  # one that was deferred strikes a moment later
            while self.struck_at is not None and time.monotonic() < until:
                pass
        except Struck:
            return True
        except BaseException as error:
            problem = repr(error)
        if self.struck_at is not None:
            problems[self.struck_at] = problem
        return len(self.seen) > before

def handler(number, frame):
    raise Struck("by a signal")

def note_unraisable(info):
    '''What strikes in a destructor cannot be raised, locally neither.'''
    striker.struck_at = None if type(info.exc_value) is Struck else striker.struck_at

def strike(program):
    for _ in range(3):
        program()
    signal.signal(signal.SIGUSR1, handler)
    while True:
        try:
            if not striker.run(program):
                break
        except Struck:  # it was deferred to here
            pass
        torch.set_grad_enabled(True)  # PyTorch's optimizers leave it off where a signal strikes their own clean-up
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

sys.unraisablehook = note_unraisable
problems, striker = {}, Striker()
"""

TRAINING = """
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to("sky:0")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(4, 8).to("sky:0")

def program():
    optimizer.zero_grad()
    loss = (model(inputs) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()

strike(program)
copy = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
copy.load_state_dict(model.state_dict())
assert (copy(inputs.cpu()) ** 2).mean().item() == program()
"""

NEVER_SEEN = """
rounds = 0

def on(device):
    width = rounds % 40 + 2
    x = torch.arange(3.0 * width).reshape(width, 3).to(device)
    counted = torch.tensor(float(rounds)).to(device) * 2 + 1
    counted += torch.ones((), device=device)
    parts = torch.renorm(x, 2, 1, 5.0).split(2) + (x[:, 1:].t().contiguous(), x[x > 4], x.nonzero())
    x[0, 1:] = torch.stack([counted, counted.clone()])
    y = torch.cat([x, x.flip(0)]).view(2, width, 3).transpose(0, 1).expand(width, 2, 3).to(torch.float64)
    products = torch.einsum("abc,abd->cd", y, y)
    return [float(counted), x.cpu(), products.numpy(force=True).tolist(), *[p.cpu() for p in parts]]

def program():
    global rounds
    rounds += 1
    on("sky:0")

strike(program)
assert str(on("sky:0")) == str(on("cpu"))
"""

SAVED = """
rounds = 0

def program():
    global rounds
    rounds += 1
    x = torch.ones(rounds % 40 + 2, 5, device="sky:0", requires_grad=True)
    with torch.autocast("sky", dtype=torch.bfloat16):
        y = torch.nn.functional.linear(x, x)
    y.float().sum().backward()
    file = io.BytesIO()
    torch.save({"x": x, "gradient": x.grad, "tied": [x, x]}, file)
    file.seek(0)
    again = torch.load(file)
    return torch.equal(again["gradient"], x.grad), again["x"].sum().item(), repr(x[:1]), x.tolist()

strike(program)
assert program()[0] and program()[1] == 5 * (rounds % 40 + 2), program()
"""

FUNCTIONS = """
torch.ones(3, device="sky:0").sum().item()
node = skyproxy.list_nodes()[0]

def double(number, tensor, table):
    return number * 2, tensor + 1, {**table, "more": [1, 2]}

def program():
    number, tensor, table = node.run(double, 3, torch.ones(3, device="sky:0"), {"a": "text"})
    assert (number, table) == (6, {"a": "text", "more": [1, 2]}), (number, table)
    assert node.submit(abs, -3).result() == 3

strike(program)
program()
"""


@pytest.mark.timeout(280)
@pytest.mark.skipif(not hasattr(sys, "settrace") or sys.version_info >= (3, 13), reason="knows CPython's instructions")
@pytest.mark.parametrize(
    ("program", "least"),
    [
        pytest.param(TRAINING, 200, id="training"),
        pytest.param(NEVER_SEEN, 800, id="never-seen", marks=pytest.mark.slow),
        pytest.param(FUNCTIONS, 400, id="functions", marks=pytest.mark.slow),
        pytest.param(SAVED, 500, id="saved", marks=pytest.mark.slow),
    ],
)
def test_what_a_handler_raises_comes_out_as_itself(program: str, least: int) -> None:
    """A clause that looks for an error of PyTorch or of a peer must not take a handler's for it."""
    end = f"assert not problems, problems\nassert len(striker.seen) > {least}, len(striker.seen)\nprint('sound')\n"
    assert succeed(STRIKES + program + end, timeout=250, OMP_NUM_THREADS="1") == "sound"
