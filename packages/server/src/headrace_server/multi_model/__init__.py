"""Several models behind one port.

Each model has an application of its own, with the routes that it would have alone. What every
request passes (keys, limits, ids, counts) stands once around all of them, and a dispatcher between
the two reads which model a request is for.

============  ===================================================================================
``naming``    the model that a request names: in its JSON, its form, or its query
``models``    the models that are served now
``dispatch``  from a name to a model's application
``loading``   what brings models and takes them away, and when
``routes``    what is asked of all of them: health, metrics, the list; and the control of them
``front``     the application around them
============  ===================================================================================
"""
