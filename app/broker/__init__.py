"""The scheduler's end of the broker: Redis or AMQP."""
