"""One conversation with one worker: records commands, batches them, resolves replies, hands out slots."""
