"""The pure logic of a saga: the next actions, given the journal and the inputs."""
